"""Committed generations of a memory service, saved as files and put back, with every byte checked.

    FOLDER/                        appears whole, by one rename, or not at all
        <key hash>-00000.bin ...   segments in their order, each cut at 4 GiB
        manifest.json              written last: devices, generations, files, checksums, and its own checksum

Checksums find damage. They are no defence against a forger, who would recompute them.
"""

from __future__ import annotations

import array
import hashlib
import logging
import os
import secrets
import shutil
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from ctypes import Array, addressof, c_char
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self, TypeVar, cast

import msgspec
import xxhash

from modelexpress.checkpoint.files import fill, opened, read_bytes
from modelexpress.errors import CheckpointError, ConfigError, GmsError, NotAvailable
from modelexpress.gms.client import Imported, Segment, Staging, Where, Write, open_session, status
from modelexpress.gms.memory import MemoryBackend
from modelexpress.gms.protocol import KeyStatus
from modelexpress.manifest import PIECE_NBYTES
from modelexpress.memory import readable_at

logger = logging.getLogger(__name__)

MANIFEST_NAME = "manifest.json"

_VERSION = 1
_FILE_NBYTES = 4 * 1024 * 1024 * 1024
_MAX_MANIFEST_NBYTES = 1024 * 1024 * 1024  # a body may have 64 MiB: protocol.MAX_FRAME_NBYTES
_NEXT_STEP = "nothing was committed; restore another archive, or save again"

T = TypeVar("T")
U = TypeVar("U")


class SavedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file. `xxh3_64`: 8 bytes for each 16 MiB of it, little-endian."""

    name: str
    nbytes: int
    xxh3_64: bytes


class SavedGeneration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was committed under one key. `segments`: their bytes, in order; `body` is the writer's, as it was."""

    namespace: str
    key: str
    label: str
    body: bytes
    segments: tuple[int, ...]
    files: tuple[SavedFile, ...]


class _Archive(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    devices: tuple[str, ...]
    generations: tuple[SavedGeneration, ...]


class _ManifestFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file: an archive as it was written, and the checksum of just these bytes."""

    xxh3_128: str
    archive: msgspec.Raw


class Restored(msgspec.Struct, frozen=True):
    """One generation that is committed again, under the number that the service gave it."""

    where: Where
    label: str
    generation: int
    nbytes: int


class _Part(NamedTuple):
    """What one file holds: bytes of a segment, and the file's name."""

    name: str
    segment: int
    offset: int
    nbytes: int


def save(
    socket_path: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    backend: MemoryBackend,
    threads: int,
    keys: Collection[str] | None = None,
) -> Path:
    """Write what is committed into a new folder; returns it. Readers and writers of the service go on meanwhile.

    The folder's mode is 0700. A process that is killed half-way leaves a folder named `.NAME.*.partial`, which
    can be removed. Peak memory: none on the host, 16 MiB a thread for a device.

    Args:
        keys: which, in all namespaces; None: every one that is committed.

    Raises:
        NotAvailable: there is no service at the path, or nothing is committed under a key.
        ConfigError: the folder exists, or its parent does not.
        GmsError: the disk has no room, or failed; states need and free. Nothing is left behind.
    """
    folder = _new_folder(folder)
    _check_threads(threads)
    with ExitStack() as sessions:
        opened_keys = _open_all(os.fspath(socket_path), backend, keys, sessions)
        generations = [(each, imported, imported.take_segments()) for each, imported in opened_keys]
        nbytes = sum(segment.mapping.nbytes for _, _, segments in generations for segment in segments)
        _check_room(folder, nbytes + sum(len(imported.body) * 2 for _, imported, _ in generations))
        with _appearing(folder) as temporary, _Workers(backend, threads) as workers:
            saved = tuple(
                _save_generation(temporary, each, imported.body, segments, workers)
                for each, imported, segments in generations
            )
            archive = msgspec.json.encode(_Archive(_VERSION, (backend.device_id(),), saved))
            manifest = _ManifestFile(xxhash.xxh3_128_hexdigest(archive), msgspec.Raw(archive))
            _write_file(temporary / MANIFEST_NAME, [msgspec.json.encode(manifest)])
    logger.info("saved %d generations, %.3f GB, as %s", len(saved), nbytes / 1e9, folder)
    return folder


def restore(
    socket_path: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    backend: MemoryBackend,
    threads: int,
) -> tuple[Restored, ...]:
    """Put all that was saved back into a service, under the same keys. What was committed there is replaced.

    Nothing is committed before every byte of the whole archive was read and found right. Peak memory, beside
    the service's: 16 MiB a thread.

    Raises:
        NotAvailable: there is no service at the path, or another process stages one of the keys.
        GmsError: a file is missing, changed or too many, or the archive is of another device or version; names
            it. Or the service has not enough memory. Nothing was committed, unless the message says so.
    """
    path, folder = os.fspath(socket_path), Path(folder)
    _check_threads(threads)
    archive = _read_manifest(folder)
    _check_devices(archive.devices, (backend.device_id(),))
    _check_files(folder, archive)
    _check_service(path, backend)
    restored: list[Restored] = []
    with ExitStack() as sessions:
        workers = sessions.enter_context(_Workers(backend, threads))
        staged: list[tuple[SavedGeneration, Staging]] = []
        for each in archive.generations:
            staging = open_session(Where(path, each.key, each.namespace), "RW", backend, wait_s=0.0)
            sessions.callback(staging.close)
            if not isinstance(staging, Staging):
                raise GmsError("the memory service granted reading to a session that asked to write")
            _fill_generation(folder, each, staging, workers)
            staged.append((each, staging))
        for each, staging in staged:
            restored.append(_commit(each, staging, restored))
    logger.info(
        "restored %d generations, %.3f GB, from %s",
        len(restored), sum(each.nbytes for each in restored) / 1e9, folder,
    )  # fmt: skip
    return tuple(restored)


def _check_threads(threads: int) -> None:
    if threads < 1:
        raise ConfigError(f"threads is {threads}; give 1 or more")


# Saving


def _new_folder(folder: str | os.PathLike[str]) -> Path:
    folder = Path(folder).absolute()
    if os.path.lexists(folder):
        raise ConfigError(f"{folder} exists, and is not overwritten; save to another name, or remove it")
    if not folder.parent.is_dir():
        raise ConfigError(f"{folder.parent} is no folder; make it, or save elsewhere")
    return folder


def _open_all(
    path: str, backend: MemoryBackend, keys: Collection[str] | None, sessions: ExitStack
) -> list[tuple[KeyStatus, Imported]]:
    """Read sessions on all that is to be saved, so that none of it changes or goes away meanwhile."""
    held = []
    for each in _committed(path, backend, keys):
        imported = open_session(Where(path, each.key, each.namespace), "RO", backend, wait_s=0.0)
        sessions.callback(imported.close)
        if not isinstance(imported, Imported):
            raise GmsError("the memory service granted staging to a session that asked to read")
        if imported.generation != each.generation:
            raise GmsError(
                f"{each.namespace}/{each.key[:16]} was committed anew, generation {imported.generation} for "
                f"{each.generation}, while it was about to be saved; save again"
            )
        held.append((each, imported))
    return held


def _committed(path: str, backend: MemoryBackend, keys: Collection[str] | None) -> list[KeyStatus]:
    found = [each for each in _check_service(path, backend) if each.generation is not None]
    missing = set(keys or ()) - {each.key for each in found}
    if missing:
        raise NotAvailable(f"the memory service at {path} has nothing committed for {_some(sorted(missing))}")
    chosen = [each for each in found if keys is None or each.key in keys]
    if not chosen:
        raise NotAvailable(f"the memory service at {path} has nothing committed; there is nothing to save")
    return sorted(chosen, key=lambda each: (each.namespace, each.key))


def _check_service(path: str, backend: MemoryBackend) -> tuple[KeyStatus, ...]:
    said = status(path)
    if said.device != backend.device:
        raise GmsError(f"the memory service at {path} keeps {said.device} memory, not {backend.device}")
    return said.keys


def _check_room(folder: Path, need: int) -> None:
    free = shutil.disk_usage(folder.parent).free
    if need > free:
        raise GmsError(f"{folder}: an archive of {need:,} bytes does not fit in {free:,} bytes of free disk")


@contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `folder` in one step that also survives a power cut, or is removed."""
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.partial")
    try:
        temporary.mkdir(mode=0o700)
        yield temporary
        _sync_folder(temporary)
        # Refused where a folder with anything in it, or a file, has come to be there meanwhile.
        temporary.rename(folder)
        _sync_folder(folder.parent)
    except OSError as exc:
        raise GmsError(f"{folder}: cannot be written: {exc.strerror}") from exc
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _save_generation(
    temporary: Path,
    committed: KeyStatus,
    body: bytes,
    segments: Sequence[Segment],
    workers: _Workers,
) -> SavedGeneration:
    def write(part: _Part) -> SavedFile:
        start = segments[part.segment].mapping.address + part.offset
        checksums = array.array("Q")

        def pieces() -> Iterator[memoryview]:
            for offset, nbytes in _cut(part.nbytes, PIECE_NBYTES):
                view = readable_at(start + offset, nbytes, workers.device)
                checksums.append(xxhash.xxh3_64_intdigest(view))
                yield view

        _write_file(temporary / part.name, pieces())
        return SavedFile(part.name, part.nbytes, _little(checksums))

    sizes = tuple(segment.mapping.nbytes for segment in segments)
    files = workers.run(write, _parts(committed.namespace, committed.key, sizes))
    return SavedGeneration(committed.namespace, committed.key, committed.label, body, sizes, tuple(files))


def _write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    with open(path, "xb", buffering=0) as file:
        for piece in pieces:
            left = memoryview(piece)
            while left:
                left = left[file.write(left) :]
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# Restoring


def _read_manifest(folder: Path) -> _Archive:
    """What was saved, as it was saved and as this version saves it."""
    path = folder / MANIFEST_NAME
    if not folder.is_dir():
        raise GmsError(f"{folder}: no folder; {_NEXT_STEP}")
    if not os.path.lexists(path):
        raise GmsError(f"{path}: missing, so this archive was never finished; {_NEXT_STEP}")
    with _regular(path) as (fd, nbytes):
        if nbytes > _MAX_MANIFEST_NBYTES:
            raise GmsError(f"{path}: {nbytes:,} bytes; a manifest has at most {_MAX_MANIFEST_NBYTES:,}; {_NEXT_STEP}")
        data = read_bytes(fd, str(path), 0, nbytes)
    try:
        file = msgspec.json.decode(data, type=_ManifestFile)
        found = xxhash.xxh3_128_hexdigest(bytes(file.archive))
        if found != file.xxh3_128:
            raise GmsError(f"{path}: has checksum {found}, and {file.xxh3_128} was recorded; {_NEXT_STEP}")
        version = msgspec.json.decode(file.archive, type=dict[str, msgspec.Raw]).get("version", msgspec.Raw(b"none"))
        if bytes(version) != b"%d" % _VERSION:
            shown = bytes(version)[:20].decode(errors="replace")
            raise GmsError(f"{path}: format version {shown}, and this modelexpress reads {_VERSION}; {_NEXT_STEP}")
        archive = msgspec.json.decode(file.archive, type=_Archive)
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise GmsError(f"{path}: cannot be read: {exc}; {_NEXT_STEP}") from exc
    _check_manifest(path, archive)
    return archive


def _check_manifest(path: Path, archive: _Archive) -> None:
    """The files it lists must be those that `save` would have made of its segments."""
    names = [(each.namespace, each.key) for each in archive.generations]
    if len(set(names)) != len(names):
        raise GmsError(f"{path}: lists a key twice; {_NEXT_STEP}")
    for each in archive.generations:
        expected = [(part.name, part.nbytes) for part in _parts(each.namespace, each.key, each.segments)]
        sums = all(len(file.xxh3_64) == 8 * len(list(_cut(file.nbytes, PIECE_NBYTES))) for file in each.files)
        if min(each.segments, default=1) < 1 or not sums or [(f.name, f.nbytes) for f in each.files] != expected:
            raise GmsError(f"{path}: its files do not make up the segments of key {each.key[:16]!a}; {_NEXT_STEP}")


def _check_devices(saved: Sequence[str], here: Sequence[str]) -> None:
    if tuple(saved) == tuple(here):
        return
    if len(saved) != len(here):
        raise GmsError(f"the archive is of {len(saved)} devices, and the service has {len(here)}; {_NEXT_STEP}")
    differing = [f"{then!a} is {now!a} here" for then, now in zip(saved, here, strict=True) if then != now]
    raise GmsError(f"the archive is of other devices: {_some(differing)}; {_NEXT_STEP}")


def _check_files(folder: Path, archive: _Archive) -> None:
    """Every file there, of its size, and no other; before anything is staged."""
    wanted = {file.name: file.nbytes for each in archive.generations for file in each.files}
    try:
        found = {entry.name: entry.stat(follow_symlinks=False).st_size for entry in os.scandir(folder)}
    except OSError as exc:
        raise GmsError(f"{folder}: cannot be listed: {exc.strerror}; {_NEXT_STEP}") from exc
    found.pop(MANIFEST_NAME, None)
    faults = [f"{name} is missing" for name in sorted(wanted.keys() - found.keys())]
    faults += [f"{name} was not saved there" for name in sorted(found.keys() - wanted.keys())]
    faults += [
        f"{name} has {found[name]:,} of {nbytes:,} bytes"
        for name, nbytes in sorted(wanted.items())
        if found.get(name, nbytes) != nbytes
    ]
    if faults:
        raise GmsError(f"{folder}: {_some(faults)}; {_NEXT_STEP}")


def _fill_generation(folder: Path, saved: SavedGeneration, staging: Staging, workers: _Workers) -> None:
    """Stage every segment from its files, compared with their checksums on the way."""
    files = dict(zip(_parts(saved.namespace, saved.key, saved.segments), saved.files, strict=True))
    for number, nbytes in enumerate(saved.segments):
        jobs = [
            _Read(folder / part.name, offset, part.offset + offset, length, expected)
            for part, file in files.items()
            if part.segment == number
            for (offset, length), expected in zip(
                _cut(part.nbytes, PIECE_NBYTES), _from_little(file.xxh3_64), strict=True
            )
        ]
        staging.add_from(nbytes, partial(_fill_segment, jobs, workers))


class _Read(NamedTuple):
    """One piece: where it lies in its file and in its segment, and the checksum it must have."""

    path: Path
    offset: int
    segment_offset: int
    nbytes: int
    xxh3_64: int


def _fill_segment(jobs: Sequence[_Read], workers: _Workers, write: Write) -> None:
    def move(job: _Read) -> None:
        buffer = workers.buffer()
        view = memoryview(buffer).cast("B")[: job.nbytes]
        with _regular(job.path) as (fd, _):
            fill(fd, str(job.path), job.offset, [view])
        found = xxhash.xxh3_64_intdigest(view)
        if found != job.xxh3_64:
            raise GmsError(
                f"{job.path}: {job.nbytes:,} bytes at offset {job.offset:,} have checksum {found:016x}, and "
                f"{job.xxh3_64:016x} was recorded; the file is damaged; {_NEXT_STEP}"
            )
        write([(addressof(buffer), job.segment_offset, job.nbytes)])

    workers.run(move, jobs)


def _commit(saved: SavedGeneration, staging: Staging, before: Sequence[Restored]) -> Restored:
    try:
        imported = staging.commit(saved.label, saved.body)
    except GmsError as exc:
        done = f"; {len(before)} generations were committed before it" if before else ""
        raise GmsError(f"{saved.namespace}/{saved.key[:16]} could not be committed{done}: {exc}") from exc
    imported.close()
    return Restored(staging.where, saved.label, imported.generation, sum(saved.segments))


@contextmanager
def _regular(path: Path) -> Iterator[tuple[int, int]]:
    """A descriptor and its bytes; what the files of checkpoints raise becomes this module's error."""
    try:
        with opened(str(path), str(path)) as (fd, state):
            yield fd, state.nbytes
    except CheckpointError as exc:
        raise GmsError(f"{exc}; {_NEXT_STEP}") from exc


# Both


def _parts(namespace: str, key: str, segments: Sequence[int]) -> list[_Part]:
    """The files that hold these segments, in order."""
    named = hashlib.sha256(msgspec.json.encode([namespace, key])).hexdigest()[:16]
    spans = [(at, *span) for at, nbytes in enumerate(segments) for span in _cut(nbytes, _FILE_NBYTES)]
    return [_Part(f"{named}-{number:05d}.bin", *span) for number, span in enumerate(spans)]


def _cut(nbytes: int, limit: int) -> Iterator[tuple[int, int]]:
    """(offset, bytes) of each piece."""
    return ((start, min(limit, nbytes - start)) for start in range(0, nbytes, limit))


class _Workers:
    """Threads that read or write memory of one device, each bound to it before it does."""

    def __init__(self, backend: MemoryBackend, threads: int) -> None:
        self.device = backend.device
        self._backend = backend
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="mx-archive")
        self._own = threading.local()

    def run(self, do: Callable[[T], U], items: Sequence[T]) -> list[U]:
        """The results, in order. Raises what the first raised, and only when none is at work any more."""

        def bound(item: T) -> U:
            self._backend.bind_thread()
            return do(item)

        futures = [self._pool.submit(bound, item) for item in items]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
            for future in futures:
                future.cancel()
            return [future.result() for future in futures if not future.cancelled()]
        finally:
            for future in futures:
                future.cancel()
            wait(futures)

    def buffer(self) -> Array[c_char]:
        """Memory for one piece, the calling thread's own: fresh memory for each would cost more than reading it."""
        if not hasattr(self._own, "buffer"):
            self._own.buffer = (c_char * PIECE_NBYTES)()
        return cast("Array[c_char]", self._own.buffer)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown()


def _little(values: array.array[int]) -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _from_little(packed: bytes) -> array.array[int]:
    values = array.array("Q", packed)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _some(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - 5} more" if len(texts) > 5 else ""
    return ", ".join(texts[:5]) + more
