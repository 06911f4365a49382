"""Two manifests in, one TransferPlan out. Pure: no memory is touched and no tensor is held.

A plan says which bytes of the source go where in the target. Everything that moves weights runs one:
the disk reader (its storages are shard files), the NIXL transport, and the same-process transport.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from modelexpress.errors import ManifestMismatch
from modelexpress.manifest import NO_STORAGE, PIECE_NBYTES, Manifest, Span, TensorSpec, cut

_LISTED = 5  # differences of each kind that an error spells out


class Range(msgspec.Struct, frozen=True, array_like=True):
    """A run of bytes that is contiguous on both sides. Storages are indices into the two manifests."""

    source_storage: int
    source_offset: int
    target_storage: int
    target_offset: int
    nbytes: int


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """Bytes that are moved by one call and verified right after it, at most PIECE_NBYTES.

    `pieces` are (checksum index, range) pairs, one per checksum of the source. `ranges` are the same
    bytes with neighbours merged, which is what is moved.
    """

    nbytes: int
    pieces: tuple[tuple[int, Range], ...]
    ranges: tuple[Range, ...]


class TransferPlan(msgspec.Struct, frozen=True):
    """Which bytes go where.

    Attributes:
        chunks: in the order of the source, so that a file is read front to back.
        strided: target tensors whose elements are not in file order; they are read one by one and copied.
        compared: tensors whose target memory another name, or another of their own elements, fills too. They
            are read once more when all is written, and must hold what is there: a tie whose two copies differ
            is an error, not a choice.
    """

    source: Manifest
    target: Manifest
    chunks: tuple[Chunk, ...]
    strided: tuple[str, ...] = ()
    compared: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(chunk.nbytes for chunk in self.chunks)

    def source_address(self, part: Range) -> int:
        return self.source.storages[part.source_storage].address + part.source_offset

    def target_address(self, part: Range) -> int:
        return self.target.storages[part.target_storage].address + part.target_offset


class Match(msgspec.Struct, frozen=True):
    """Which span of the target gets the bytes of which span of the source, before anything is cut for moving.

    `pairs` maps the index of a source span to its target span. `strided` and `compared` as in a plan.
    """

    spans: tuple[Span, ...]
    pairs: dict[int, Span]
    strided: tuple[str, ...] = ()
    compared: tuple[str, ...] = ()


def plan_transfer(source: Manifest, target: Manifest) -> TransferPlan:
    """Plan the move of a model between two processes that hold it in one layout; see `match_layouts`."""
    match = match_layouts(source, target)
    return TransferPlan(source, target, _chunks(match.spans, match.pairs))


def plan_checkpoint(source: Manifest, target: Manifest) -> TransferPlan:
    """Plan the filling of a model from raw checkpoint tensors; see `match_checkpoint`."""
    match = match_checkpoint(source, target)
    return TransferPlan(source, target, _chunks(match.spans, match.pairs), match.strided, match.compared)


def match_layouts(source: Manifest, target: Manifest) -> Match:
    """Pair every span of the target with the span of the same tensors in the source.

    For models in the same layout: names, shapes, strides, dtypes, ties and scalars must be equal on both
    sides. How tensors are grouped into storages may differ. Every byte of a span must belong to a tensor.

    Raises:
        ManifestMismatch: lists the first five differences of each kind and the totals; nothing was written.
    """
    differences = _Differences()
    ours, theirs = _by_name(target.tensors), _by_name(source.tensors)
    # Two processes that run the same code describe a model alike, down to its storages.
    alike = (source.tensors, source.scalars) == (target.tensors, target.scalars)
    if not alike:
        differences.compare_names(ours, theirs)
        for name in ours.keys() & theirs.keys():
            differences.compare(ours[name], theirs[name], with_stride=True)
        differences.compare_scalars(dict(target.scalars), dict(source.scalars))
        differences.raise_if_any()

    spans = source.spans()
    destinations = {span.names[0]: span for span in (spans if alike else target.spans())}
    pairs: dict[int, Span] = {}
    for index, span in enumerate(spans):
        matching, alone = destinations.get(span.names[0]), len(span.names) == 1
        if matching is None or not (alike or _inner_layout(span, theirs) == _inner_layout(matching, ours)):
            differences.add("shared memory differs", f"{min(span.names)} with {', '.join(sorted(span.names))}")
            continue
        if not any(theirs[name].is_dense and (alone or theirs[name].nbytes == span.nbytes) for name in span.names):
            # Copying the span would copy what lies between the elements, too, and that may be somebody else's.
            differences.add(
                "strided with gaps or overlaps, which a one-sided read cannot follow", ", ".join(span.names)
            )
        pairs[index] = matching
    differences.raise_if_any()
    return Match(spans, pairs)


def match_checkpoint(source: Manifest, target: Manifest) -> Match:
    """Pair every persistent tensor of the target with the checkpoint tensor of the same name.

    Checkpoint tensors are contiguous and never share memory; a target may tie several names to one
    memory, of which the checkpoint may hold one or all. Every target byte is written exactly once.

    Raises:
        ManifestMismatch: a tensor is missing, unexpected, or of another shape or dtype. Lists the first
            five of each kind and the totals; or the source holds no raw tensors. Nothing was written.
    """
    source_spans = source.raw_spans()
    differences = _Differences()
    ours, theirs = _by_name(target.tensors), _by_name(source.tensors)
    filled: dict[str, Span] = {}
    strided: list[str] = []
    compared: list[str] = []
    for span in target.spans():
        present = [name for name in span.names if name in theirs]
        covering = [name for name in present if ours[name].is_dense and ours[name].nbytes == span.nbytes]
        direct = next((name for name in covering if ours[name].is_contiguous), None)
        if direct is not None:
            filled[direct] = span
            compared.extend(name for name in present if name != direct)
        elif covering or len(present) == len(span.names):
            strided.extend(present)
            compared.extend(present if len(present) > 1 or not covering else ())
        else:
            differences.missing.extend(name for name in span.names if name not in theirs)
    differences.missing.extend(t.name for t in target.tensors if t.storage == NO_STORAGE and t.name not in theirs)
    differences.unexpected.extend(theirs.keys() - ours.keys())
    for name in ours.keys() & theirs.keys():
        differences.compare(ours[name], theirs[name], with_stride=False)
    differences.raise_if_any()

    pairs = {index: filled[span.names[0]] for index, span in enumerate(source_spans) if span.names[0] in filled}
    return Match(source_spans, pairs, tuple(strided), tuple(compared))


def _chunks(spans: Sequence[Span], pairs: Mapping[int, Span]) -> tuple[Chunk, ...]:
    """Cut the source's spans into chunks at piece boundaries; `pairs` says where the span of an index goes."""
    chunks: list[Chunk] = []
    open_pieces: list[tuple[int, Range]] = []
    open_nbytes = 0
    for number, piece in enumerate(cut(spans)):
        matching = pairs.get(piece.span)
        if matching is None:
            continue
        if (
            matching.nbytes != spans[piece.span].nbytes
        ):  # whatever was overlooked before, no byte lands beside its place
            raise ManifestMismatch(
                f"tensor {spans[piece.span].names[0]!r} has {spans[piece.span].nbytes:,} bytes in the source and "
                f"{matching.nbytes:,} in the target"
            )
        shift = matching.offset - spans[piece.span].offset
        part = Range(piece.storage, piece.offset, matching.storage, piece.offset + shift, piece.nbytes)
        if open_pieces and open_nbytes + piece.nbytes > PIECE_NBYTES:
            chunks.append(_chunk(open_pieces, open_nbytes))
            open_pieces, open_nbytes = [], 0
        open_pieces.append((number, part))
        open_nbytes += piece.nbytes
    if open_pieces:
        chunks.append(_chunk(open_pieces, open_nbytes))
    return tuple(chunks)


def _chunk(numbered: list[tuple[int, Range]], nbytes: int) -> Chunk:
    return Chunk(nbytes, tuple(numbered), tuple(_merge(part for _, part in numbered)))


def _merge(parts: Iterable[Range]) -> list[Range]:
    merged: list[Range] = []
    for part in parts:
        if merged and _touch(merged[-1], part):
            first = merged.pop()
            part = msgspec.structs.replace(first, nbytes=first.nbytes + part.nbytes)
        merged.append(part)
    return merged


def _touch(before: Range, after: Range) -> bool:
    return (
        before.source_storage == after.source_storage
        and before.target_storage == after.target_storage
        and before.source_offset + before.nbytes == after.source_offset
        and before.target_offset + before.nbytes == after.target_offset
    )


def _inner_layout(span: Span, tensors: Mapping[str, TensorSpec]) -> dict[str, int]:
    """Where each tensor of a span starts, from the span's own start."""
    return {name: tensors[name].offset - span.offset for name in span.names}


def _by_name(tensors: Iterable[TensorSpec]) -> dict[str, TensorSpec]:
    return {tensor.name: tensor for tensor in tensors}


class _Differences:
    """Collects what does not match, and raises it all at once."""

    def __init__(self) -> None:
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self._others: dict[str, list[str]] = {}

    def add(self, kind: str, what: str) -> None:
        self._others.setdefault(kind, []).append(what)

    def compare_names(self, ours: Mapping[str, TensorSpec], theirs: Mapping[str, TensorSpec]) -> None:
        self.missing.extend(ours.keys() - theirs.keys())
        self.unexpected.extend(theirs.keys() - ours.keys())

    def compare(self, ours: TensorSpec, theirs: TensorSpec, *, with_stride: bool) -> None:
        if ours.shape != theirs.shape:
            self.add("shape differs", f"{ours.name}: target {list(ours.shape)}, source {list(theirs.shape)}")
        elif ours.dtype != theirs.dtype:
            self.add("dtype differs", f"{ours.name}: target {ours.dtype}, source {theirs.dtype}")
        elif with_stride and ours.stride != theirs.stride:
            self.add("stride differs", f"{ours.name}: target {list(ours.stride)}, source {list(theirs.stride)}")

    def compare_scalars(self, ours: Mapping[str, str], theirs: Mapping[str, str]) -> None:
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) != theirs.get(name):
                self.add(
                    "Python values that differ and cannot travel",
                    f"{name}: target {ours.get(name, 'absent')}, source {theirs.get(name, 'absent')}",
                )

    def raise_if_any(self) -> None:
        kinds = {"missing in the source": self.missing, "unexpected in the source": self.unexpected, **self._others}
        found = [f"{len(what)} {kind} ({_first(sorted(what))})" for kind, what in kinds.items() if what]
        if found:
            raise ManifestMismatch("the source has other weights than the target: " + "; ".join(found))


def _first(what: list[str]) -> str:
    shown = ", ".join(what[:_LISTED])
    return f"{shown}, and {len(what) - _LISTED} more" if len(what) > _LISTED else shown
