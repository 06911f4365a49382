"""Registries and sources for the tests on SGLang."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.sglang_cpu.environment import ROOT, engine_environment, service_device


def new_registry(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URL of an empty registry on this host."""
    folder = tmp_path_factory.mktemp("registry")
    folder.chmod(0o700)
    return f"file://{folder}"


def config_only(model: Path, folder: Path) -> Path:
    """A copy of a model's folder without its shards."""
    return Path(shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors*")))


@contextmanager
def serving(checkpoint: Path, registry: str, *, revision: str, model_name: str) -> Iterator[int]:
    """`modelexpress serve` as a process; gives its pid."""
    named = ["--revision", revision, "--model-name", model_name]
    with _command("serve", str(checkpoint), "--registry", registry, *named) as pid:
        yield pid


@contextmanager
def keeping(socket: str) -> Iterator[int]:
    """`modelexpress gms serve` as a process, of memory of the engines' device; gives its pid."""
    with _command("gms", "serve", "--socket", socket, "--device", service_device()) as pid:
        yield pid


@contextmanager
def _command(*arguments: str) -> Iterator[int]:
    """One of our commands that says "ready" and then runs until SIGTERM."""
    command = [sys.executable, "-m", "modelexpress", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=engine_environment(), cwd=ROOT)
    try:
        line = process.stdout.readline()
        if not line.startswith("ready "):
            raise RuntimeError(f"{' '.join(arguments[:2])} said {line!r} and ended with {process.wait(10)}")
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(30)
        finally:
            process.kill()
            process.stdout.close()
