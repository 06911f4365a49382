"""A module imports only from lower levels; levels are those of docs/structure.md."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "modelexpress"
LEVELS = {
    "errors": 0,
    "config": 1,
    "manifest": 1,
    "memory": 1,
    "dispatch_mode": 1,
    "plan": 2,
    "checkpoint.strict_json": 0,
    "checkpoint.header": 2,
    "checkpoint.files": 1,
    "checkpoint.folder": 2,
    "checkpoint.page_cache": 1,
    "checkpoint.index": 3,
    "checkpoint.shard_reader": 4,
    "checkpoint.blocks": 1,
    "checkpoint.content_digest": 4,
    "discovery": 2,
    "aliases": 2,
    "digest": 3,
    "offer": 2,
    "gms.state": 1,
    "gms.protocol": 2,
    "gms.memory": 2,
    "gms.listener": 1,
    "gms.store": 3,
    "gms.server": 4,
    "gms.client": 3,
    "gms.region": 1,
    "gms.arena": 4,
    "gms.cuda": 3,
    "gms.backend": 4,
    "gms.archive": 4,
    "gms.weights": 6,
    "strategies.gms": 7,
    "terminal": 1,
    "gms_cli": 10,
    "snapshot_cli": 10,
    "criu": 1,
    "devices": 1,
    "processes": 1,
    "leftovers": 2,
    "thread_name": 1,
    "model_root": 3,
    "transport": 3,
    "frame": 1,
    "lanes": 4,
    "nixl_transport": 5,
    "host_transport": 5,
    "tcp_transport": 5,
    "destination": 3,
    "peer_transport": 4,
    "stripe": 5,
    "registry.url": 1,
    "registry.base": 1,
    "registry.locked_file": 2,
    "registry.directory": 3,
    "registry.redis": 3,
    "registry.open": 4,
    "checkpoint.base": 4,
    "checkpoint.observed": 5,
    "checkpoint.peer": 6,
    "checkpoint.reader": 5,
    "checkpoint.checksums": 6,
    "adapter": 5,
    "identity": 5,
    "strategies.base": 6,
    "strategies.chain": 7,
    "strategies.rdma": 7,
    "strategies.turn": 6,
    "strategies.disk": 7,
    "source": 7,
    "takeover_lock": 3,
    "api": 8,
    "engines.byte_runs": 1,
    "engines.watch": 2,
    "engines.coverage": 3,
    "engines.sglang.identity": 6,
    "engines.sglang.control": 2,
    "engines.sglang.snapshot": 3,
    "engines.sglang.ranks": 1,
    "engines.sglang.memory": 7,
    "engines.sglang.failover": 8,
    "engines.sglang.regions": 2,
    "engines.sglang.resident": 9,
    "engines.sglang.adapter": 10,
    "engines.sglang.lifecycle": 10,
    "engines.sglang.loader": 11,
    "engines.sglang.plugin": 12,
    "doctor": 9,
    "cli": 11,
    "__main__": 12,
}


def modules() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        if not name.endswith("__init__"):
            found[name] = path
    return found


def imports_of(path: Path) -> set[str]:
    names = set()
    typing_only = set()
    for node in ast.walk(tree := ast.parse(path.read_text())):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            typing_only.update(id(each) for each in ast.walk(node))
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("modelexpress"):
            base = node.module.removeprefix("modelexpress").lstrip(".")
            imported = {f"{base}.{each.name}".lstrip(".") for each in node.names} - {"__version__"}
            names.update({base} if base in LEVELS else imported)
    return names


def test_every_module_has_a_level():
    assert set(modules()) == set(LEVELS)


@pytest.mark.parametrize("name", sorted(LEVELS))
def test_imports_go_down_only(name):
    upward = {each for each in imports_of(modules()[name]) if LEVELS[each] >= LEVELS[name]}

    assert not upward


@pytest.mark.parametrize("name", sorted(LEVELS))
def test_no_function_is_over_100_lines(name):
    functions = [
        node
        for node in ast.walk(ast.parse(modules()[name].read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]

    assert not [each.name for each in functions if each.end_lineno - each.lineno >= 100]
