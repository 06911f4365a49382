"""A few files of older SGLang releases, and classes made of some of their methods.

A release and what it needs are gigabytes; its wheel alone is 12 to 40 MB, and the methods that matter here need next to
nothing. They run as they are written, on objects that have what they use.
"""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

CACHE = Path(__file__).parents[2] / ".sglang-releases"
"""Beside the tree and ignored by git."""

_DOWNLOAD_S = 120
_FILES = (
    "sglang/srt/managers/scheduler.py",
    "sglang/srt/managers/tp_worker.py",
    "sglang/srt/mem_cache/kv_cache_configurator.py",
    "sglang/srt/model_executor/model_runner.py",
    "sglang/srt/model_executor/model_runner_kv_cache_mixin.py",
    "sglang/srt/model_loader/loader.py",
)


class NoRelease(Exception):
    """The files cannot be had here; the message says why."""


def release(version: str) -> Path:
    """A folder with those of `_FILES` that the release has; fetched once.

    Raises:
        NoRelease: there is no network, or no wheel for this Python.
    """
    folder = CACHE / version
    if not folder.exists():
        CACHE.mkdir(exist_ok=True)
        # Under a passing name, so that a run that is killed leaves no half of it.
        with tempfile.TemporaryDirectory(dir=CACHE) as passing:
            _fetch(version, Path(passing))
            (Path(passing) / "files").rename(folder)
    return folder


def _fetch(version: str, passing: Path) -> None:
    wanted = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", f"sglang=={version}"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(passing), *wanted]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_S, check=False)
    except subprocess.TimeoutExpired as exc:
        raise NoRelease(f"SGLang {version} was not downloaded within {_DOWNLOAD_S} s") from exc
    if ended.returncode:
        said = [line for line in ended.stderr.splitlines() if line.startswith("ERROR")] or ended.stderr.splitlines()
        raise NoRelease(f"SGLang {version} cannot be downloaded: {said[-1] if said else 'pip does not say why'}")
    (wheel,) = passing.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name in set(_FILES) & set(archive.namelist()):
            target = passing / "files" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(name) as source, target.open("wb") as kept:
                shutil.copyfileobj(source, kept)


def excerpt(
    path: Path, name: str, members: Sequence[str], names: Mapping[str, object], bases: Sequence[type] = ()
) -> type:
    """A class with some members of the class `name` in a file, and of those that the file has.

    Args:
        members: methods, properties and annotated attributes.
        names: what the members find as globals.
        bases: in place of those in the file.
    """
    tree = ast.parse(path.read_text(), str(path))
    (found,) = (each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == name)
    found.body = [each for each in found.body if _name_of(each) in members] or [ast.Pass()]
    found.decorator_list, found.keywords = [], []
    found.bases = [ast.Name(f"_base_{at}", ast.Load()) for at in range(len(bases))]
    # With the future of this file: annotations are not looked up, so that nothing has to be there only to be named.
    code = compile(ast.fix_missing_locations(ast.Module([found], [])), str(path), "exec")
    space = {**names, **{f"_base_{at}": base for at, base in enumerate(bases)}, "__name__": path.stem}
    exec(code, space)  # the release's own code, fetched from where the package comes from
    made: type = space[name]
    return made


def _name_of(statement: ast.stmt) -> str | None:
    if isinstance(statement, ast.FunctionDef):
        return statement.name
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return statement.target.id
    return None
