"""The plugin in a process of its own, on a tree that has SGLang's names, and on trees that lack some of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TREE = {
    "sglang/__init__.py": "",
    "sglang/srt/__init__.py": "",
    "sglang/srt/server_args.py": (
        "LOAD_FORMAT_CHOICES = ['auto']\nadd_load_format_choices = LOAD_FORMAT_CHOICES.extend\n"
    ),
    "sglang/srt/plugins/__init__.py": "",
    "sglang/srt/plugins/hook_registry.py": (
        "from enum import Enum\n"
        "HookType = Enum('HookType', 'AROUND')\n"
        "class HookRegistry:\n"
        "    @staticmethod\n"
        "    def register(target, hook, kind):\n"
        "        print('hooked', target, kind.name)\n"
    ),
    "sglang/srt/configs/__init__.py": "",
    "sglang/srt/configs/load_config.py": (
        "from enum import Enum\n"
        "class LoadFormat(str, Enum):\n"
        "    AUTO = 'auto'\n"
        "class LoadConfig:\n"
        "    def _verify_load_format(self):\n"
        "        pass\n"
    ),
    "sglang-0.5.10.dist-info/METADATA": "Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.10\n",
}
REGISTER = "from modelexpress.engines.sglang.plugin import register; register()"


def run(code: str, tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"PYTHONPATH": f"{tree}{os.pathsep}{Path(__file__).parents[2]}"}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in TREE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_it_adds_the_format_once_and_hooks_the_gate(tree):
    code = f"{REGISTER}; register()\nfrom sglang.srt.server_args import LOAD_FORMAT_CHOICES as c; print(c)"

    ended = run(code, tree)

    assert ended.stderr == ""
    assert "hooked sglang.srt.configs.load_config.LoadConfig._verify_load_format AROUND" in ended.stdout
    assert "['auto', 'modelexpress']" in ended.stdout


def test_it_imports_nothing_heavy_and_says_nothing(tree):
    code = f"{REGISTER}\nimport sys; print(sorted({{'torch', 'nixl', 'numpy', 'msgspec', 'redis'}} & set(sys.modules)))"

    ended = run(code, tree, "--load-format", "auto")

    assert ended.stdout.splitlines()[-1] == "[]"
    assert ended.stderr == ""


LACKING = {
    "add_load_format_choices": ("sglang/srt/server_args.py", "LOAD_FORMAT_CHOICES = []\n"),
    "HookRegistry": ("sglang/srt/plugins/hook_registry.py", ""),
    "LoadConfig._verify_load_format": (
        "sglang/srt/configs/load_config.py",
        "from enum import Enum\nclass LoadFormat(str, Enum):\n    AUTO = 'auto'\nclass LoadConfig:\n    pass\n",
    ),
}


@pytest.mark.parametrize("missing", LACKING)
def test_a_missing_name_ends_a_launch_that_asks_for_the_format(missing, tree):
    path, text = LACKING[missing]
    (tree / path).write_text(text)

    asked = run(REGISTER, tree, "--load-format", "modelexpress")
    written = run(REGISTER, tree, "--load-format=modelexpress")
    other = run(REGISTER, tree, "--load-format", "auto")

    for ended in (asked, written):
        assert ended.returncode != 0
        assert "cannot be a load format of SGLang 0.5.10: it has no sglang.srt." in ended.stderr
        assert missing in ended.stderr
        assert "it works with SGLang 0.5.13 to 0.5.23" in ended.stderr
    assert (other.returncode, other.stderr) == (0, "")


def test_a_missing_name_is_told_to_the_python_engine_too(tree):
    path, text = LACKING["LoadConfig._verify_load_format"]
    (tree / path).write_text(text)
    use = f"{REGISTER}\nfrom sglang.srt.configs.load_config import LoadFormat\nLoadFormat('auto')\nLoadFormat('{{}}')"

    assert "modelexpress cannot be a load format of SGLang 0.5.10" in run(use.format("modelexpress"), tree).stderr
    assert "'other' is not a valid LoadFormat" in run(use.format("other"), tree).stderr


def test_without_the_package_an_older_engine_is_left_alone(tree):
    (tree / "sglang/srt/plugins/hook_registry.py").unlink()

    assert run(REGISTER, tree, "serve").returncode == 0
