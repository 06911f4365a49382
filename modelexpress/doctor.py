"""Which ways of loading work on this machine, and why the others do not. Every line is tried, none is guessed."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Literal

import msgspec
import torch

from modelexpress.api import nixl_transport, registry_of
from modelexpress.config import Config
from modelexpress.errors import ModelExpressError, describe
from modelexpress.gms.client import status
from modelexpress.registry.open import redact
from modelexpress.takeover_lock import look


class Finding(msgspec.Struct, frozen=True):
    """One thing that was tried."""

    what: str
    state: Literal["works", "fails", "off"]
    detail: str


def examine(config: Config) -> list[Finding]:
    """Try everything that a load on this machine may use. Takes a second or two; changes nothing."""
    return list(_findings(config))


def _findings(config: Config) -> Iterator[Finding]:
    yield Finding("python", "works", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield Finding("torch", "works", f"{torch.__version__}, {_accelerators()}")
    yield Finding("disk", "works", f"safetensors, {config.threads} threads")
    yield _tried("rdma: nixl", lambda: _try_nixl(config))
    yield _tried("rdma: redis package", lambda: f"redis {metadata.version('redis')}")
    yield _registry(config)
    yield _gms(config)
    yield _takeover_lock(config)
    yield _cross_memory_attach()
    yield _shared_memory()


def _tried(what: str, run: Callable[[], str]) -> Finding:
    try:
        return Finding(what, "works", run())
    except metadata.PackageNotFoundError as exc:
        return Finding(what, "fails", f"{exc.name} is not installed; pip install 'modelexpress[{exc.name}]'")
    except ModelExpressError as exc:
        return Finding(what, "fails", describe(exc))


def _try_nixl(config: Config) -> str:
    from modelexpress.manifest import Manifest

    transport = nixl_transport(config)
    try:
        transport.register(Manifest((), ())).close()
    finally:
        transport.close()
    return f"nixl {metadata.version('nixl')}: an agent was made and closed"


def _registry(config: Config) -> Finding:
    if config.registry is None:
        return Finding("registry", "off", "none is configured; set --registry or MX_REGISTRY")

    def look() -> str:
        registry = registry_of(config)
        try:
            return f"{redact(config.registry or '')}: sources: {len(registry.find(None))}"
        finally:
            registry.close()

    return _tried("registry", look)


def _gms(config: Config) -> Finding:
    if config.gms is None:
        return Finding("gms", "off", "no memory service is configured; set --gms or MX_GMS")

    def look() -> str:
        held = status(config.gms or "")
        return f"pid {held.pid} holds {held.used_nbytes / 1e9:.3f} GB of {held.device} memory, keys: {len(held.keys)}"

    return _tried("gms", look)


def _takeover_lock(config: Config) -> Finding:
    if config.takeover_lock is None:
        return Finding("takeover lock", "off", "none is configured; set --takeover-lock or MX_TAKEOVER_LOCK")

    def who() -> str:
        seen = look(config.takeover_lock or "")
        if seen.owner is None:
            return (
                f"{config.takeover_lock}: held, and its owner has not said who it is" if seen.held else "nobody has it"
            )
        if not seen.held:
            return f"nobody has it; the last was {seen.owner.owner}, since {seen.owner.since}"
        took = f", took over from {seen.owner.took_over_from}" if seen.owner.took_over_from else ""
        return f"{seen.owner.owner} serves {seen.owner.serves} at {seen.owner.url} since {seen.owner.since}{took}"

    return _tried("takeover lock", who)


def _accelerators() -> str:
    if not torch.cuda.is_available():
        return "no GPU: weights live in host memory"
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"


def _cross_memory_attach() -> Finding:
    """Whether one process may read another's memory directly, tried with a child of our own."""
    reading, writing = os.pipe()
    secret = ctypes.create_string_buffer(b"modelexpress")
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)  # until the parent closes its end
        os._exit(0)
    try:
        copy = ctypes.create_string_buffer(len(secret))
        moved = _process_vm_readv(child, ctypes.addressof(secret), ctypes.addressof(copy), len(secret))
    finally:
        os.close(writing)
        os.close(reading)
        os.waitpid(child, 0)
    if moved == len(secret) and copy.raw == secret.raw:
        return Finding("rdma: same-host copies", "works", "cross-memory attach is allowed between our processes")
    reason = os.strerror(-moved) if moved < 0 else f"{moved} bytes copied"
    return Finding("rdma: same-host copies", "fails", f"cross-memory attach: {reason}; peers on this host use TCP")


def _process_vm_readv(pid: int, source: int, target: int, nbytes: int) -> int:
    class Block(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))

    libc = ctypes.CDLL(None, use_errno=True)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    local, remote = Block(target, nbytes), Block(source, nbytes)
    moved = libc.process_vm_readv(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
    return int(moved) if moved >= 0 else -ctypes.get_errno()


def _shared_memory() -> Finding:
    shm = Path("/dev/shm")
    if not shm.is_dir():
        return Finding("shared memory", "fails", "/dev/shm is not mounted")
    usage = shutil.disk_usage(shm)
    return Finding("shared memory", "works", f"/dev/shm: {usage.free / 1e9:.1f} of {usage.total / 1e9:.1f} GB free")
