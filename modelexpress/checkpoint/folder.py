"""Which files make up a checkpoint. Looks at names and links; opens only the index.

Rules, in this order:

1. A file: it must be named `*.safetensors`, and is the whole checkpoint. Whoever names a file trusts its link.
2. A folder with `model.safetensors.index.json`: exactly the shards that the index names. An index value is a
   relative name like `model-00001-of-00002.safetensors` or `part/model.safetensors` (sub-folders are
   allowed). Absolute names, `..`, `.`, empty parts and NUL are refused before anything is opened.
3. A folder with `model.safetensors`: that file alone.
4. Any other folder: all its `*.safetensors`, but no hidden files, no `adapter_model*` (adapters are no
   checkpoint), and no `consolidated*` where `model-*` holds the same weights. Numbered names
   (`model-00001-of-00003.safetensors`) must be complete.

Links: the real path of a file must lie in the real path of the folder. One exception, for the hub cache: in
`models--*/snapshots/*` a link may lead into the `blobs` folder of the same `models--*`.

Pickle files are never read: unpickling can run code.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

import msgspec

from modelexpress.checkpoint.files import opened, read_bytes, unusable
from modelexpress.checkpoint.strict_json import NotStrictJson, parse_object
from modelexpress.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
SUFFIX = ".safetensors"

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_MAX_INDEX_NBYTES = 256 * 1024 * 1024  # 90,000 tensors need 9 MB
_MAX_SHARDS = 65_536
_LISTED = 5  # files that an error spells out
_NUMBERED = re.compile(r"(?P<stem>.*)-(?P<number>\d+)-of-(?P<total>\d+)\.safetensors")


class Files(msgspec.Struct, frozen=True):
    """The files of one checkpoint: (name relative to `root`, real path), sorted by name. All are regular
    files with bytes in them, or were a moment ago. `shard_of` is the index: tensor to file name. `single`:
    the caller named a file, not a folder.
    """

    root: Path
    files: tuple[tuple[str, str], ...]
    shard_of: dict[str, str] | None
    single: bool = False


def find_files(path: str | os.PathLike[str]) -> Files:
    """The files of the checkpoint at `path`, by the rules of this module.

    Raises:
        CheckpointError: nothing there, a pickle, an index that cannot be used, or shards that are missing,
            empty, no regular files, or outside the folder. Lists all of one kind; no shard was opened.
    """
    root = Path(os.path.abspath(path))
    try:
        mode = root.stat().st_mode
    except FileNotFoundError as exc:
        raise CheckpointError(f"{root}: {_absence(root)}") from exc
    except (OSError, ValueError) as exc:
        raise CheckpointError(f"{root}: cannot be looked at: {exc}") from exc
    if not stat.S_ISDIR(mode):
        return _single_file(root)
    if os.path.lexists(root / INDEX_NAME):
        shard_of = _read_index(root)
        return Files(root, _locate(root, set(shard_of.values())), shard_of)
    return Files(root, _locate(root, _unindexed(root)), None)


def resolve_inside(root: Path, name: str) -> str:
    """The real path of a file of the checkpoint at `root`. Opens nothing; the file need not exist.

    Raises:
        CheckpointError: it is a link that leads out of the folder, or to nothing.
    """
    path, real_root = root / name, os.path.realpath(root)
    real = os.path.realpath(path)
    blobs = _hub_blobs(Path(real_root))
    if not (Path(real).is_relative_to(real_root) or (blobs and Path(real).is_relative_to(blobs))):
        raise CheckpointError(
            f"{path}: leads to {real}, outside the model folder and no hub cache blob; give the folder that really "
            "holds the file, or copy it"
        )
    if os.path.islink(path) and not os.path.exists(real):
        raise CheckpointError(f"{path}: {_absence(path)}")
    return real


def _hub_blobs(real_root: Path) -> Path | None:
    """`<cache>/models--x/blobs` for a folder at or below `<cache>/models--x/snapshots/<revision>`, else None."""
    for revision in (real_root, *real_root.parents):
        model = revision.parent.parent
        if revision.parent.name == "snapshots" and model.name.startswith("models--"):
            return model / "blobs"
    return None


def _absence(path: Path) -> str:
    if os.path.islink(path):
        return f"a link to {os.readlink(path)!r}, where nothing is; an unfinished download? Download it again"
    return "does not exist"


def _single_file(path: Path) -> Files:
    if path.suffix in _PICKLES:
        raise CheckpointError(_pickle_refusal(str(path)))
    if path.suffix != SUFFIX:
        raise CheckpointError(f"{path}: neither a folder nor named *{SUFFIX}")
    real = os.path.realpath(path)
    reason = unusable(real)
    if reason:
        raise CheckpointError(f"{path}: {reason}")
    return Files(path.parent, ((path.name, real),), None, single=True)


def _pickle_refusal(shown: str) -> str:
    return (
        f"{shown}: a pickle, and loading a pickle can run code, so modelexpress never does; convert it to safetensors "
        "(load it where you trust it, then safetensors.torch.save_file or save_pretrained)"
    )


def _read_index(root: Path) -> dict[str, str]:
    """The weight map: tensor name to shard name, with every value checked as a name."""
    path = root / INDEX_NAME
    with opened(resolve_inside(root, INDEX_NAME), str(path)) as (fd, state):
        if state.nbytes > _MAX_INDEX_NBYTES:
            raise CheckpointError(f"{path}: {state.nbytes:,} bytes; an index has at most {_MAX_INDEX_NBYTES:,}")
        data = read_bytes(fd, str(path), 0, state.nbytes)
    try:
        shard_of = parse_object(data.lstrip()).get("weight_map")
    except NotStrictJson as exc:
        raise CheckpointError(f"{path}: cannot be read: {exc}") from exc
    if not isinstance(shard_of, dict) or not shard_of:
        raise CheckpointError(f"{path}: has no weight_map from tensor names to shard names")
    for tensor, shard in shard_of.items():
        reason = _bad_name(shard)
        if reason:
            raise CheckpointError(f"{path}: tensor {tensor!r} lies in {shard!r:.200}: {reason}")
    if len(set(shard_of.values())) > _MAX_SHARDS:
        raise CheckpointError(f"{path}: names {len(set(shard_of.values())):,} shards; at most {_MAX_SHARDS:,}")
    return shard_of


def _bad_name(name: object) -> str | None:
    if not isinstance(name, str) or not name:
        return "not a file name"
    if "\0" in name:
        return "a name with NUL in it"
    if name.startswith("/"):
        return "an absolute path; a shard is named relative to the folder"
    if any(part in ("", ".", "..") for part in name.split("/")):
        return "not a plain path inside the folder"
    if name.endswith(_PICKLES):
        return "a pickle, and loading a pickle can run code; convert the checkpoint to safetensors"
    return None if name.endswith(SUFFIX) else f"not named *{SUFFIX}"


def _locate(root: Path, names: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Find and look at every file before the first is opened, so that one error lists all that is wrong."""
    files = [(name, resolve_inside(root, name)) for name in sorted(names)]
    found = [(name, unusable(real)) for name, real in files]
    wrong = [f"{name} ({reason})" for name, reason in found if reason]
    if wrong:
        more = f", and {len(wrong) - _LISTED} more" if len(wrong) > _LISTED else ""
        raise CheckpointError(
            f"{root}: {len(wrong)} of {len(files)} shards cannot be read: {', '.join(wrong[:_LISTED])}{more}; "
            "download them again"
        )
    return tuple(files)


def _unindexed(root: Path) -> list[str]:
    try:
        every = sorted(os.listdir(root))
    except OSError as exc:
        raise CheckpointError(f"{root}: cannot be listed: {exc.strerror}") from exc
    if SINGLE_NAME in every:
        return [SINGLE_NAME]
    names = [name for name in every if name.endswith(SUFFIX) and not name.startswith((".", "adapter_model"))]
    if any(name.startswith("model-") for name in names):
        names = [name for name in names if not name.startswith("consolidated")]
    if not names:
        raise CheckpointError(_nothing_here(root, every))
    if len(names) > _MAX_SHARDS:
        raise CheckpointError(f"{root}: holds {len(names):,} *{SUFFIX} files; at most {_MAX_SHARDS:,}")
    _check_complete(root, names)
    return names


def _nothing_here(root: Path, every: list[str]) -> str:
    pickles = [name for name in every if name.endswith(_PICKLES)]
    if pickles:
        return _pickle_refusal(f"{root} holds no *{SUFFIX} but {', '.join(pickles[:_LISTED])}")
    return f"{root}: holds no *{SUFFIX} that is a checkpoint (adapter_model* and hidden files are none)"


def _check_complete(root: Path, names: list[str]) -> None:
    """Numbered shards run from 1 to their total, or from 0 to one less."""
    found: dict[tuple[str, str], set[int]] = {}
    for name in names:
        match = _NUMBERED.fullmatch(name)
        if match:
            found.setdefault((match["stem"], match["total"]), set()).add(int(match["number"]))
    for (stem, total), numbers in found.items():
        first = 0 if 0 in numbers else 1
        if len(numbers) == int(total) and numbers == set(range(first, first + len(numbers))):
            continue
        lacking = (n for n in range(first, first + int(total)) if n not in numbers)
        listed = ", ".join(f"{stem}-{n:0{len(total)}}-of-{total}{SUFFIX}" for n, _ in zip(lacking, range(_LISTED)))  # noqa: B905 - the first few of them
        raise CheckpointError(
            f"{root}: {len(numbers)} of {int(total)} shards {stem}-*-of-{total}{SUFFIX} are there; missing: "
            f"{listed or 'none, but there are more than the total'}"
        )
