"""A model's weights in a memory service: moving them there, and binding a model to them without a copy.

Parameters end up on the service's memory, which nobody can change. Everything else that a model may write to
(buffers, derived tensors) is copied into it when it is imported, and stays private.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import torch
from torch import nn

from modelexpress.adapter import EngineAdapter
from modelexpress.aliases import hidden_aliases
from modelexpress.digest import PieceChecksums, checksum_at, checksums_of
from modelexpress.discovery import FoundTensor, dtype_name, manifest_of, persistent_tensors, torch_dtype
from modelexpress.errors import GmsError, ManifestMismatch, NotAvailable
from modelexpress.gms.arena import Piece
from modelexpress.gms.client import Imported, Segment, Staging
from modelexpress.gms.memory import return_freed_memory
from modelexpress.manifest import DTYPE_NBYTES, NO_STORAGE, Manifest, Span, StorageSpec, TensorSpec, WeightsIdentity
from modelexpress.plan import Match, match_checkpoint, match_layouts
from modelexpress.registry.base import SourceKind

logger = logging.getLogger(__name__)

# Storages share segments: few descriptors to import, and never much more memory than the model while it moves.
_SEGMENT_NBYTES = 64 * 1024 * 1024
_SEGMENTS = 32  # a segment has 3 % of a larger model, up to:
_LARGE_SEGMENT_NBYTES = 1024 * 1024 * 1024
# More than a cache line, so that no two storages lie at the same place modulo a page: copies between such are
# two to three times slower.
_ALIGN_NBYTES = 256


class Place(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a storage lies: byte `offset` of a segment."""

    segment: int
    offset: int


class Contents(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a writer says about a generation: whose weights, which tensors, and where storage n lies.

    `kind` as for sources: the layout of an engine, or the raw tensors of a checkpoint. `checksums` were made
    before the weights moved; empty when none were wanted.
    """

    identity: WeightsIdentity
    kind: SourceKind
    manifest: Manifest
    places: tuple[Place, ...]
    checksums: bytes


def publish_model(
    staging: Staging,
    adapter: EngineAdapter,
    module: nn.Module,
    *,
    kind: SourceKind,
    label: str,
    checksums: bool,
    threads: int,
    pieces: Sequence[Piece] = (),
) -> Imported:
    """Move a model's weights into a staged generation, storage by storage, and commit it.

    The model goes on with the service's memory under its parameters. At no moment is there more than the model
    and one segment: the largest storage, 64 MiB, or a 32nd of the model up to 1 GiB. When it raises, nothing is
    published and the model has its weights, wherever they lie by then; the staging is closed.

    Args:
        pieces: what `Arena.settle` gave. Storages that lie there stay where they are, and what may be written to
            of them moves out into private memory.

    Raises:
        NotAvailable, ManifestMismatch: the model holds a tensor that cannot be bound, or somebody else holds a
            piece; says which; nothing was changed.
        GmsError: no memory or quota, or the service is gone.
    """
    with staging:
        found = adapter.tensors(module)
        manifest = manifest_of(found.tensors, found.scalars)
        tensors = {each.name: each for each in found.tensors}
        match_layouts(manifest, manifest)  # what no importer could match is not worth its memory
        specs, shared, born = _by_storage(manifest), _parameter_storages(manifest), _born(manifest, pieces)
        moving = shared ^ born.keys()
        _refuse_unbindable([spec for at in moving for spec in specs[at]], tensors, staging.device)
        _refuse_hidden(found.tensors, [manifest.storages[at] for at in moving])
        made = checksums_of(manifest, threads=threads) if checksums else b""
        places = {at: Place(staging.segments.index(each.segment), each.offset) for at, each in born.items()}
        for group in _groups(manifest, [at for at in range(len(specs)) if at not in born]):
            segment, offsets = _move(staging, manifest, group)
            for at, offset in zip(group, offsets, strict=True):
                places[at] = Place(len(staging.segments) - 1, offset)
                if at in shared:
                    _bind(segment.tensor(offset, manifest.storages[at].nbytes), specs[at], tensors)
            return_freed_memory()
        written = born.keys() - shared
        for at in written:
            own = born[at].segment.tensor(born[at].offset, manifest.storages[at].nbytes).clone()
            _bind(own, specs[at], tensors)
        if written:
            nbytes = sum(manifest.storages[at].nbytes for at in written)
            logger.info("%d bytes that may be written to became private, in %d storages", nbytes, len(written))
        contents = Contents(adapter.identity(), kind, manifest, tuple(places[at] for at in range(len(specs))), made)
        imported = staging.commit(label, msgspec.msgpack.encode(contents))
        imported.take_segments()  # the parameters keep what they need
        return imported


class Moved(NamedTuple):
    """What left the service's memory: (private, shared) bytes of each storage; `shared` is empty where not kept."""

    storages: tuple[tuple[torch.Tensor, torch.Tensor], ...]

    @property
    def nbytes(self) -> int:
        return sum(own.numel() for own, _ in self.storages)

    def bring_back(self) -> None:
        """Copy the old bytes into the private memory."""
        for own, shared in self.storages:
            own.copy_(shared)


def make_private(adapter: EngineAdapter, module: nn.Module, imported: Imported, *, keep: bool) -> Moved:
    """Move what lies in the service's memory into private memory, storage by storage, so that it can be written.

    Ties, views and whoever holds the tensors see the new memory. A paused generation has no bytes: zeros take their
    place.

    Args:
        keep: hold the old memory, so that the bytes can be brought back. Else each segment is let go of as soon as
            nothing lies in it, and at no moment is there more than the model and one segment.

    Raises:
        NotAvailable: a tensor cannot look elsewhere, or something that is no part of the model looks at the memory;
            names it; nothing was changed.
    """
    found = adapter.tensors(module)
    manifest = manifest_of(found.tensors, found.scalars)
    tensors = {each.name: each for each in found.tensors}
    specs = _by_storage(manifest)
    moving = [at for at, storage in enumerate(manifest.storages) if imported.holds(storage.address)]
    _refuse_unbindable([spec for at in moving for spec in specs[at]], tensors, imported.device)
    _refuse_hidden(found.tensors, [manifest.storages[at] for at in moving])
    moved = []
    for at in moving:
        first = tensors[specs[at][0].name].tensor
        shared = first.new_empty(0, dtype=torch.uint8).set_(first.untyped_storage())
        own = torch.zeros_like(shared, device=imported.device) if imported.paused else shared.clone()
        _bind(own, specs[at], tensors)
        moved.append((own, shared if keep and not imported.paused else shared.new_empty(0)))
        del first, shared
    return Moved(tuple(moved))


def contents_of(body: bytes, segment_nbytes: Sequence[int]) -> Contents:
    """What the writer said, checked against what was mapped.

    Raises:
        GmsError: it cannot be read, or places a storage outside its segment.
    """
    try:
        contents = msgspec.msgpack.decode(body, type=Contents)
        contents.manifest.validate()
        if contents.kind == "checkpoint":
            contents.manifest.raw_spans()
    except (msgspec.MsgspecError, ValueError, RecursionError, ManifestMismatch) as exc:
        raise GmsError(f"the committed generation cannot be read: {exc}") from exc
    if len(contents.places) != len(contents.manifest.storages):
        raise GmsError("the committed generation does not place each of its storages")
    for place, storage in zip(contents.places, contents.manifest.storages, strict=True):
        if storage.device == "file":
            raise GmsError("the committed generation holds storages that lie in files")
        inside = 0 <= place.segment < len(segment_nbytes) and place.offset >= 0
        if not inside or place.offset + storage.nbytes > segment_nbytes[place.segment]:
            raise GmsError(
                f"the committed generation places {storage.nbytes:,} bytes outside of segment {place.segment}"
            )
    return contents


class Binding(NamedTuple):
    """A generation matched with the model that will lie on it.

    `found` are the model's tensors.
    """

    match: Match
    target: Manifest
    found: tuple[FoundTensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(span.nbytes for span in self.match.pairs.values())


def match_model(contents: Contents, adapter: EngineAdapter, module: nn.Module) -> Binding:
    """Check that the generation has exactly what the model needs; the model may be on the meta device.

    Raises:
        NotAvailable, ManifestMismatch: it has not; names what differs. Nothing was changed.
    """
    if contents.kind == "checkpoint":
        found = persistent_tensors(module)
        _refuse_aliases(found, adapter.tensors(module).tensors)
        target = manifest_of(found, meta=True)
        match = match_checkpoint(contents.manifest, target)
        if match.strided or match.compared:
            names = ", ".join((*match.strided, *match.compared)[:5])
            raise NotAvailable(f"raw tensors cannot be bound where the model's lie otherwise or share memory: {names}")
    else:
        discovery = adapter.tensors(module)
        found = discovery.tensors
        target = manifest_of(found, discovery.scalars, meta=True)
        match = match_layouts(contents.manifest, target)
    for device in {contents.manifest.storages[match.spans[index].storage].device for index in match.pairs}:
        _refuse_absent(device)
    for span in match.pairs.values():
        _refuse_unaligned(span, target)
    _refuse_unreachable(found)
    return Binding(match, target, found)


def bind_model(contents: Contents, binding: Binding, segments: Sequence[Segment]) -> int:
    """Put the generation under the model: parameters without a copy, everything else into private memory.

    Returns the bytes that became private. Aliases stay aliases, and nothing that was matched is on the meta
    device afterwards.
    """
    specs = {spec.name: spec for spec in binding.target.tensors}
    tensors = {each.name: each for each in binding.found}
    storages = contents.manifest.storages
    fresh: dict[int, torch.Tensor] = {}  # what takes the place of a tensor on the meta device, by the old one's id
    private_nbytes = 0
    for index, span in binding.match.pairs.items():
        source = binding.match.spans[index]
        place = contents.places[source.storage]
        start = place.offset + source.offset
        stored = segments[place.segment].tensor(start, source.nbytes)
        inside = [specs[name] for name in span.names]
        shared = any(spec.kind == "parameter" for spec in inside)
        if not shared or any(start % DTYPE_NBYTES[spec.dtype] for spec in inside):
            stored, shared = stored.to(storages[source.storage].device, copy=True), False
            private_nbytes += span.nbytes
        for spec in inside:
            _put(tensors[spec.name], _view(stored, spec, spec.offset - span.offset), fresh, bound=shared)
    for spec in binding.target.tensors:
        if spec.storage == NO_STORAGE and tensors[spec.name].tensor.is_meta:
            empty = torch.empty(spec.shape, dtype=torch_dtype(spec), device=storages[0].device if storages else "cpu")
            _put(tensors[spec.name], empty, fresh, bound=True)
    return private_nbytes


def _put(found: FoundTensor, value: torch.Tensor, fresh: dict[int, torch.Tensor], *, bound: bool) -> None:
    """Give a tensor of the model these bytes: `bound` to them, or copied into the memory that it has.

    `.data` cannot move a tensor off the meta device, so a new object takes its place there: of the same class,
    with what hung on the old one, and one new object for all names of a tie.
    """
    old = found.tensor
    if not old.is_meta:
        with torch.no_grad():
            if bound:
                old.data = value
            else:
                old.copy_(value)
        return
    if id(old) not in fresh:
        if isinstance(old, nn.Parameter):
            value = torch.Tensor._make_subclass(type(old), value, old.requires_grad)
        if attributes := vars(old):
            vars(value).update(attributes)
        fresh[id(old)] = value
    if found.registered is not None:
        holder, key = found.registered
        holder[key] = fresh[id(old)]


def check_checksums(imported: Imported) -> int:
    """Compare every byte with the checksums that the writer made; returns the bytes that were compared.

    Raises:
        VerificationFailed: names the tensor.
        ManifestMismatch: the writer made no checksums.
    """
    segments = imported.take_segments()
    contents = contents_of(imported.body, [segment.mapping.nbytes for segment in segments])
    expected = PieceChecksums(contents.manifest, contents.checksums)
    for number, piece in enumerate(expected.pieces):
        place = contents.places[piece.storage]
        mapping = segments[place.segment].mapping
        device = contents.manifest.storages[piece.storage].device
        expected.compare(number, checksum_at(mapping.address + place.offset + piece.offset, piece.nbytes, device))
    return contents.manifest.nbytes


def _move(staging: Staging, manifest: Manifest, group: Sequence[int]) -> tuple[Segment, list[int]]:
    """Copy a group of storages into one new segment; where each begins in it."""
    offsets: list[int] = []
    end = 0
    for at in group:
        offsets.append(end)
        end = _aligned(end + manifest.storages[at].nbytes)
    parts = [
        (manifest.storages[at].address, offset, manifest.storages[at].nbytes)
        for at, offset in zip(group, offsets, strict=True)
    ]
    return staging.add(end, parts), offsets


def _groups(manifest: Manifest, storages: Sequence[int]) -> Iterator[list[int]]:
    """These storages in their order, as many to a group as fit into one segment."""
    sizes = [storage.nbytes for storage in manifest.storages]
    limit = max([_SEGMENT_NBYTES, min(sum(sizes) // _SEGMENTS, _LARGE_SEGMENT_NBYTES), *sizes])
    group: list[int] = []
    nbytes = 0
    for at in storages:
        if group and nbytes + sizes[at] > limit:
            yield group
            group, nbytes = [], 0
        group.append(at)
        nbytes += _aligned(sizes[at])
    if group:
        yield group


def _born(manifest: Manifest, pieces: Sequence[Piece]) -> dict[int, Piece]:
    """The storages, by their numbers, that lie in the staged generation already.

    Raises:
        NotAvailable: something that is no part of the model lies there, too. It would be frozen with it.
    """
    by_address = {piece.address: piece for piece in pieces}
    found = [by_address.pop(storage.address, None) for storage in manifest.storages]
    if by_address:
        nbytes = sum(piece.nbytes for piece in by_address.values())
        raise NotAvailable(
            f"{len(by_address)} tensors of {nbytes:,} bytes were allocated with the weights and are no part of the "
            "model; allocate what is not weights outside of the region"
        )
    return {at: piece for at, piece in enumerate(found) if piece is not None}


def _bind(stored: torch.Tensor, specs: Sequence[TensorSpec], tensors: Mapping[str, FoundTensor]) -> None:
    """Let all tensors of one storage look into `stored`."""
    for spec in specs:
        tensors[spec.name].tensor.data = _view(stored, spec, spec.offset)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN_NBYTES) * _ALIGN_NBYTES


def _parameter_storages(manifest: Manifest) -> frozenset[int]:
    return frozenset(spec.storage for spec in manifest.tensors if spec.kind == "parameter") - {NO_STORAGE}


def _by_storage(manifest: Manifest) -> list[list[TensorSpec]]:
    specs: list[list[TensorSpec]] = [[] for _ in manifest.storages]
    for spec in manifest.tensors:
        if spec.storage != NO_STORAGE:
            specs[spec.storage].append(spec)
    return specs


def _view(stored: torch.Tensor, spec: TensorSpec, offset: int) -> torch.Tensor:
    """The described tensor, `offset` bytes into `stored`."""
    empty = stored.new_empty(0, dtype=torch_dtype(spec))
    return empty.set_(stored.untyped_storage(), offset // DTYPE_NBYTES[spec.dtype], spec.shape, spec.stride)


def _refuse_aliases(persistent: Sequence[FoundTensor], every: Sequence[FoundTensor]) -> None:
    """A raw checkpoint fills what is persistent. What else looks at that memory would keep looking at the old.

    Raises:
        NotAvailable: names such a tensor, or one on the meta device that nothing would fill.
    """
    names = {each.name for each in persistent}
    for each in every:
        if each.tensor.is_meta and each.name not in names:
            raise NotAvailable(f"tensor {each.name!r} is on the meta device, and a raw checkpoint does not hold it")
    for span in manifest_of(tuple(every), meta=True).spans():
        others = [name for name in span.names if name not in names]
        if others and len(others) < len(span.names):
            raise NotAvailable(
                f"tensor {others[0]!r} shares its memory with weights, and a raw checkpoint cannot move it"
            )


def _refuse_unaligned(span: Span, manifest: Manifest) -> None:
    """torch counts offsets in elements; a tensor that begins between two cannot be made over new memory."""
    specs = {spec.name: spec for spec in manifest.tensors} if len(span.names) > 1 else {}
    for name in span.names if specs else ():
        if (specs[name].offset - span.offset) % DTYPE_NBYTES[specs[name].dtype]:
            raise NotAvailable(f"tensor {name!r} begins in the middle of an element of the memory that it shares")


def _refuse_absent(device: str) -> None:
    """What may be written to is copied to where its writer had it, and this process may not have such a device."""
    if device == "cpu":
        return
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as exc:  # torch asserts that it was built for the device
        raise NotAvailable(f"the generation has tensors on {device}, which cannot be used here: {exc}") from exc


def _refuse_unreachable(found: Iterable[FoundTensor]) -> None:
    """A tensor on the meta device gives its place to another, and only modules keep places for that."""
    for each in found:
        if each.tensor.is_meta and each.registered is None:
            raise NotAvailable(f"tensor {each.name!r} is on the meta device and cannot be replaced where it hangs")


def _refuse_hidden(found: Sequence[FoundTensor], storages: Sequence[StorageSpec]) -> None:
    """What is no part of the model would go on looking at the old memory.

    Raises:
        NotAvailable: says what it is.
    """
    hidden = hidden_aliases([each.tensor for each in found], storages)
    if hidden:
        first = hidden[0]
        raise NotAvailable(
            f"{len(hidden)} tensors outside of the model look at its memory, like one of shape {list(first.shape)} and "
            f"{dtype_name(first)}; they would not follow when it moves"
        )


def _refuse_unbindable(specs: Iterable[TensorSpec], tensors: Mapping[str, FoundTensor], device: str) -> None:
    """Before anything moves: a tensor that cannot look elsewhere must not be found half-way."""
    for spec in specs:
        if str(tensors[spec.name].tensor.device) != device:
            found = tensors[spec.name].tensor.device
            raise NotAvailable(f"tensor {spec.name!r} lies on {found}, and the service keeps memory of {device}")
        if spec.offset % DTYPE_NBYTES[spec.dtype]:
            raise NotAvailable(f"tensor {spec.name!r} begins in the middle of an element of its memory")
        if tensors[spec.name].tensor.is_inference():
            raise NotAvailable(f"tensor {spec.name!r} was made in inference mode and cannot be bound to other memory")
