"""Proof that an engine's own loading code fills a model: what it writes is recorded, without knowing the model.

Engines fuse checkpoint tensors (q, k and v into one parameter, experts into another), split them over ranks and pad
them, in code that nobody outside can predict, and do not check that every byte was written. So the code is run once
in rehearsal, with tensors that have shapes and no values, and writes that are not carried out: a dispatch mode sees
each of them, with its place in the model's memory and the checkpoint tensors that it came from. A checkpoint that
does not fit is refused before a byte of the model changes. Then the same code runs in earnest.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn

from modelexpress.discovery import FoundTensor, dtype_name, persistent_tensors, torch_dtype
from modelexpress.engines.byte_runs import Runs, Writes, covers, gaps_of, runs_of
from modelexpress.engines.watch import Operation, Watcher, address_of, tensors_in
from modelexpress.errors import CheckpointError, ModelExpressError, describe
from modelexpress.manifest import Manifest
from modelexpress.memory import memory_at

logger = logging.getLogger(__name__)

Weights = Iterator[tuple[str, torch.Tensor]]
Load = Callable[[nn.Module, Weights], object]

_LISTED = 10  # names that an error spells out: a decoder layer of nine tensors fits
_FILLED_NBYTES = 1 << 16  # stand-ins up to this size hold values, since loaders look into small tensors
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MAKERS = ("cat", "stack")  # operations that may make their result in given memory (`out=`)
_NUMERIC = re.compile(r"(?<![^.])\d+(?![^.])")  # a component of a dotted name that is a number


@dataclass(frozen=True, slots=True)
class Expectation:
    """What an engine may do on purpose; everything else is refused.

    Attributes:
        optional: whether a parameter, by name, may keep the value that its constructor gave it.
        unused: whether a checkpoint tensor, by name, may be ignored.
        metadata: whether a checkpoint tensor, by name, is about others and no weight: it may be converted, and
            written over by its like.
        padding: parameter name to the first row, from which rows may be filled with a constant.
        widened: names of parameters that are larger than the checkpoint's tensors, alike in every layer, and that
            the engine has filled with zeros before.
    """

    optional: Callable[[str], bool] = lambda name: False
    unused: Callable[[str], bool] = lambda name: False
    metadata: Callable[[str], bool] = lambda name: False
    padding: Mapping[str, int] = field(default_factory=dict)
    widened: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """What a load will do.

    Attributes:
        nbytes: bytes of the model that come from the checkpoint.
        narrows: whether some of them become narrower.
        same: pairs of tensors that go to the same memory, and so must be the same.
        unfilled: optional parameters that no tensor fills.
    """

    nbytes: int
    narrows: bool = False
    same: frozenset[tuple[str, str]] = frozenset()
    unfilled: frozenset[str] = frozenset()


def rehearse(
    module: nn.Module, checkpoint: Manifest, label: str, load: Load, expected: Expectation, *, partly: bool = False
) -> Rehearsed:
    """Run `load` with stand-ins for the tensors of a checkpoint, and without writing to the model.

    Costs the engine's own bookkeeping, some 0.1 ms a tensor, and no bytes: stand-ins are memory that is never
    touched.

    Args:
        partly: these tensors are some of a checkpoint's, and need not fill the model.

    Raises:
        CheckpointError: a parameter, or a part of one, would not be filled, or by a tensor of another shape or
            kind of number; or a tensor belongs to a module of the model and is not used. Names tensors.
    """
    rehearsal = _Rehearsal(module, label, expected)
    try:
        stand_ins = rehearsal.stand_ins(checkpoint)
        with _left_as_it_is(module), rehearsal.watching():
            load(module, stand_ins)
    except (ModelExpressError, MemoryError):
        raise
    except Exception as exc:  # whatever the engine's code says to a tensor that it cannot take
        raise CheckpointError(f"{label}: {rehearsal.blamed()} does not fit the model: {describe(exc)}") from exc
    return rehearsal.checked(partly=partly)


def load_rehearsed(
    module: nn.Module, tensors: Weights, label: str, load: Load, expected: Expectation, rehearsed: Rehearsed
) -> int:
    """Run `load` in earnest, after its rehearsal; returns the bytes that were written from the checkpoint.

    Raises:
        CheckpointError: a value became infinite, or another number, in a narrower type; or two tensors that are one
            in the model differ. The model is half-written.
    """
    if rehearsed.same:
        tensors = _compared(tensors, rehearsed.same, label)
    if not rehearsed.narrows:
        load(module, tensors)
        return rehearsed.nbytes
    conversions = _Conversions(label, expected)
    with conversions.watching():
        load(module, conversions.given(tensors))
    conversions.check()
    return rehearsed.nbytes


def _compared(tensors: Weights, same: frozenset[tuple[str, str]], label: str) -> Weights:
    """Pass tensors on, and compare those that must be the same by digests of their bytes."""
    others: dict[str, set[str]] = {}
    for one, other in same:
        others.setdefault(one, set()).add(other)
        others.setdefault(other, set()).add(one)
    digests: dict[str, bytes] = {}
    for name, tensor in tensors:
        if name in others:
            digests[name] = xxhash.xxh3_128_digest(memory_at(tensor.data_ptr(), tensor.nbytes))
            for other in others[name] & digests.keys():
                if digests[other] != digests[name]:
                    raise CheckpointError(
                        f"{label}: tensors {other!r} and {name!r} differ, and the model keeps them in the same memory"
                    )
        yield name, tensor


@contextmanager
def _left_as_it_is(module: nn.Module) -> Iterator[None]:
    """What the block hangs on modules, takes off them, or puts in the place of their tensors, is undone."""
    registers = ("_parameters", "_buffers", "_modules")
    kept = [(each, dict(vars(each)), [dict(vars(each)[name]) for name in registers]) for each in module.modules()]
    data = [(each, each.data) for each in module.parameters()]
    try:
        yield
    finally:
        for each, attributes, registered in kept:
            vars(each).clear()
            vars(each).update(attributes)
            for name, members in zip(registers, registered, strict=True):
                vars(each)[name].clear()
                vars(each)[name].update(members)
        for parameter, before in data:
            if address_of(parameter) != address_of(before):
                parameter.data = before


@dataclass(frozen=True, slots=True)
class _Target:
    """A parameter or buffer that must be filled: where it began, in its storage, and its bytes."""

    found: FoundTensor
    storage: int
    runs: Runs


class _Conversions(Watcher):
    """Looks at each copy into a narrower type, once it is done."""

    def __init__(self, label: str, expected: Expectation) -> None:
        super().__init__()
        self._label = label
        self._expected = expected
        self._counts: Counter[str] = Counter()
        self._refused: CheckpointError | None = None

    def given(self, tensors: Weights) -> Weights:
        """Pass tensors on, and know the name of the last one."""
        for name, tensor in tensors:
            self.last = name
            yield name, tensor

    def run(self, operation: Operation, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if operation.kind == "copy_" and _narrows(args[1].dtype, args[0].dtype):
            if self._expected.metadata(self.last):
                return result
            self._look(args[0], args[1].to(args[0].device))
        return result

    def _look(self, target: torch.Tensor, value: torch.Tensor) -> None:
        with self.lock:
            self._counts[f"{dtype_name(value)} to {dtype_name(target)}"] += 1
        if target.dtype.is_floating_point:
            lost = torch.isinf(target) & torch.isfinite(value)
        else:
            lost = target.to(value.dtype) != value
        if lost.any():
            self._refused = self._refused or CheckpointError(
                f"{self._label}: tensor {self.last!r}, or one right before it, holds {int(lost.sum())} values that "
                f"{dtype_name(target)} cannot; choose another --dtype"
            )
            raise self._refused

    def check(self) -> None:
        """Raise what the engine's code may have swallowed, and tell of what was converted."""
        if self._refused is not None:
            raise CheckpointError(str(self._refused))
        kinds = ", ".join(f"{count} from {kind}" for kind, count in sorted(self._counts.items()))
        logger.warning("%s: tensors were converted to a narrower type: %s", self._label, kinds)


class _Rehearsal(Watcher):
    """What one run of an engine's loading code would write. Its threads tell it, too."""

    def __init__(self, module: nn.Module, label: str, expected: Expectation) -> None:
        super().__init__()
        self._module = module
        self._label = label
        self._expected = expected
        self._targets = {found.name: _target(found) for found in persistent_tensors(module) if found.tensor.numel()}
        self._by_storage: dict[int, list[_Target]] = {}
        for target in self._targets.values():
            self._by_storage.setdefault(target.storage, []).append(target)
        self._writes = {storage: Writes() for storage in self._by_storage}
        self._origins: dict[int, frozenset[str]] = {}  # storage of a tensor in flight -> what it was made from
        self._filled_up: dict[int, frozenset[str]] = {}  # storage of a tensor that the engine made larger
        self._padded: dict[str, tuple[int, ...]] = {}  # checkpoint tensor -> shape that the engine gave it
        self._held: list[torch.Tensor] = []
        self._given: dict[str, tuple[int, ...]] = {}
        self._used: set[str] = set()
        self._narrows = False
        self._same: set[tuple[str, str]] = set()
        self._unfilled: set[str] = set()
        self._refused: CheckpointError | None = None

    def stand_ins(self, checkpoint: Manifest) -> Weights:
        """A tensor for each one of the checkpoint, known by its memory from now on."""
        # All are made now, outside of any mode. Untouched memory costs nothing, and each keeps its own.
        self._held = [_stand_in(spec.shape, torch_dtype(spec), spec.nbytes) for spec in checkpoint.tensors]
        for spec, tensor in zip(checkpoint.tensors, self._held, strict=True):
            if tensor.numel():
                self._origins[address_of(tensor)] = frozenset({spec.name})
            else:
                self._used.add(spec.name)
        return self._hand_out([spec.name for spec in checkpoint.tensors])

    def _hand_out(self, names: list[str]) -> Weights:
        for name, tensor in zip(names, self._held, strict=True):
            self._given[name] = tuple(tensor.shape)
            self.last = name
            yield name, tensor

    def run(self, operation: Operation, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = tensors_in((*args, *kwargs.values()))
        origins = self._origins_of(inputs)
        written = operation.written_tensors(args, kwargs)
        ours = [each for each in written if address_of(each) in self._by_storage]
        if not ours:
            result = func(*args, **kwargs)
            self._note_outputs(operation, result, inputs, origins)
            return result
        for each in ours:
            if each.numel():
                self._note_write(operation.kind, each, args, origins)
        return written[0]

    def blamed(self) -> str:
        """The tensor that the engine's code was busy with, with its shape and that of its like."""
        name = self.failed or self.last
        shape = self._given.get(name)
        like = next((each for each in self._given if each != name and _pattern(each) == _pattern(name)), None)
        shown = f"tensor {name!r} of shape {list(shape or ())}"
        if like is None or self._given[like] == shape:
            return shown
        return f"{shown}, where {like!r} has {list(self._given[like])},"

    def checked(self, *, partly: bool) -> Rehearsed:
        """Raise unless every byte would be written, or some are `partly`, and every tensor be used."""
        self._held.clear()
        if self._refused is not None:
            raise CheckpointError(str(self._refused))
        if not partly:
            self._require_all_bytes()
        self._require_no_odd_padding()
        self._require_all_used()
        nbytes = sum(each.nbytes for each in self._writes.values())
        return Rehearsed(nbytes, self._narrows, frozenset(self._same), frozenset(self._unfilled))

    def _origins_of(self, inputs: list[torch.Tensor]) -> frozenset[str]:
        with self.lock:
            found = [names for each in inputs if (names := self._origins.get(address_of(each)))]
            origins = found[0] if len(found) == 1 else frozenset().union(*found)
            self._used |= origins
        return origins

    def _note_outputs(
        self, operation: Operation, result: Any, inputs: list[torch.Tensor], origins: frozenset[str]
    ) -> None:
        before = {address_of(each) for each in inputs}
        with self.lock:
            fresh = operation.kind == "cat" and any(each not in self._origins for each in before)
            filled_up = frozenset().union(*(self._filled_up.get(each, ()) for each in before))
            if fresh or operation.kind == "constant_pad_nd":
                filled_up = origins
            for address in {address_of(each) for each in tensors_in([result])} - self._by_storage.keys():
                _note(self._origins, address, origins, forget=address not in before)
                _note(self._filled_up, address, filled_up, forget=address not in before)

    def _note_write(self, kind: str, target: torch.Tensor, args: tuple[Any, ...], origins: frozenset[str]) -> None:
        if kind == "copy_" and origins:
            self._require_like(target, args[1], origins)
            for name in self._filled_up.get(address_of(args[1]), ()):
                self._padded[name] = tuple(args[1].shape)
        elif kind in ("fill_", "zero_"):
            if target.numel() != 1 and not self._is_padding(target):
                return
        elif kind not in _MAKERS or not origins:
            return  # arithmetic on what is there: no new value from a checkpoint
        with self.lock:
            self._writes[address_of(target)].add(target, origins)

    def _require_like(self, target: torch.Tensor, value: torch.Tensor, origins: frozenset[str]) -> None:
        if value.numel() != target.numel():
            self._refuse(
                f"{self._label}: tensor {_shown(origins)} has shape {list(value.shape)} where the model has "
                f"{list(target.shape)}, in {self._names_at(target)}"
            )
        if all(self._expected.metadata(each) for each in origins):
            return
        if not _may_convert(value.dtype, target.dtype):
            self._refuse(
                f"{self._label}: tensor {_shown(origins)} is {dtype_name(value)} and the model's "
                f"{self._names_at(target)} is {dtype_name(target)}; there is no conversion that keeps its values"
            )
        if _narrows(value.dtype, target.dtype):
            self._narrows = True

    def _refuse(self, message: str) -> None:
        """Raise, and remember it for the case that the engine's code swallows what is raised."""
        error = CheckpointError(message)
        if self._refused is None:
            self._refused = error
        raise error

    def _is_padding(self, target: torch.Tensor) -> bool:
        """Whether a constant goes only to rows that no checkpoint has."""
        for each in self._by_storage[address_of(target)]:
            first = self._expected.padding.get(each.found.name)
            if first is not None and target.numel():
                tensor = each.found.tensor
                row_nbytes = tensor.stride(0) * tensor.element_size()
                return bool(runs_of(target)[0, 0] >= each.runs[0, 0] + first * row_nbytes)
        return False

    def _names_at(self, target: torch.Tensor) -> str:
        start = runs_of(target)[0, 0]
        inside = [each for each in self._by_storage[address_of(target)] if covers(each.runs, start)]
        return " and ".join(repr(each.found.name) for each in inside) or "its memory"

    def _require_all_bytes(self) -> None:
        missing: list[str] = []
        patterns = self._written_patterns()
        now = dict(self._module.named_parameters(remove_duplicate=False))
        widened: dict[str, tuple[str, Runs]] = {}
        for storage, targets in self._by_storage.items():
            written = self._writes[storage].runs()
            if (written[1:, 0] < written[:-1, 1]).any():
                self._note_same(storage)
            for target in targets:
                gaps = gaps_of(target.runs, written)
                if not len(gaps) or not self._must_be_filled(target, patterns) or self._replaced(target, now):
                    continue
                name = target.found.name
                if name in self._expected.widened and len(written):
                    _, like = widened.setdefault(_pattern(name), (name, gaps - target.runs[0, 0]))
                    if np.array_equal(like, gaps - target.runs[0, 0]):
                        continue
                missing.extend(self._missing_names(target, gaps))
        if missing:
            names = sorted(set(missing))
            more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
            raise CheckpointError(
                f"{self._label}: the checkpoint lacks {len(names)} tensors that the model needs: "
                f"{', '.join(names[:_LISTED])}{more}"
            )

    def _must_be_filled(self, target: _Target, patterns: set[str]) -> bool:
        if self._expected.optional(target.found.name):
            self._unfilled.add(target.found.name)
            return False
        # A buffer may be a constant of the architecture; where its like in another layer came from the
        # checkpoint, it is a weight.
        return target.found.kind == "parameter" or _pattern(target.found.name) in patterns

    def _written_patterns(self) -> set[str]:
        return {
            _pattern(target.found.name)
            for storage, targets in self._by_storage.items()
            for target in targets
            if self._writes[storage]
        }

    def _replaced(self, target: _Target, now: dict[str, nn.Parameter]) -> bool:
        """Whether the engine put another tensor in the parameter's place, made from the checkpoint."""
        instead = now.get(target.found.name)
        return instead is not None and address_of(instead) != target.storage and address_of(instead) in self._origins

    def _note_same(self, storage: int) -> None:
        """Two tensors for the same memory, as a tied head that is stored beside the embedding, must be the same."""
        for names in self._writes[storage].written_twice():
            weights = sorted(each for each in names if not self._expected.metadata(each))
            self._same.update(pairwise(weights))

    def _missing_names(self, target: _Target, gaps: Runs) -> list[str]:
        """What the checkpoint would call the missing part: as its like in another layer, where there is one."""
        name = target.found.name
        base = target.runs[0, 0]
        numbers = _NUMERIC.findall(name)
        for other in self._targets.values():
            if other.found.name == name or _pattern(other.found.name) != _pattern(name):
                continue
            theirs = _NUMERIC.findall(other.found.name)
            shifted = gaps - base + other.runs[0, 0]
            writers = self._writes[other.storage].names_in(shifted)
            names = {_renumbered(each, theirs, numbers) for each in writers}
            if names - self._given.keys():
                return [repr(each) for each in names - self._given.keys()]
            if names:
                return [f"more of {each!r} than its shape {list(self._given[each])}" for each in names]
        whole = len(gaps) == len(target.runs) and bool((gaps == target.runs).all())
        part = "" if whole else f" ({int((gaps[:, 1] - gaps[:, 0]).sum()):,} of {target.found.tensor.nbytes:,} bytes)"
        return [f"{name!r}{part}"]

    def _require_no_odd_padding(self) -> None:
        """A model may be wider than its checkpoint, and is so in every layer; one short tensor is a broken one."""
        alike: dict[str, list[str]] = {}
        for name in self._given if self._padded else ():
            alike.setdefault(_pattern(name), []).append(name)
        for name, shape in self._padded.items():
            like = alike[_pattern(name)]
            odd = [each for each in like if (self._given[each], self._padded.get(each)) != (self._given[name], shape)]
            if odd or len(like) == 1:
                other = f", where {odd[0]!r} has {list(self._given[odd[0]])}" if odd else ""
                raise CheckpointError(
                    f"{self._label}: tensor {name!r} of shape {list(self._given[name])} would be filled up to "
                    f"{list(shape)}{other}"
                )

    def _require_all_used(self) -> None:
        unused = [name for name in self._given if name not in self._used and not self._expected.unused(name)]
        modules = {name.rpartition(".")[0] for name in self._used}
        lost = [name for name in unused if name.rpartition(".")[0] in modules]
        if lost:
            more = f" and {len(lost) - _LISTED} more" if len(lost) > _LISTED else ""
            raise CheckpointError(
                f"{self._label}: the checkpoint has {len(lost)} tensors of modules that the model has, and the "
                f"model does not use them: {', '.join(map(repr, lost[:_LISTED]))}{more}"
            )
        if unused:
            shown = ", ".join(unused[:5])
            logger.warning("%s: %d tensors belong to no part of this model: %s ...", self._label, len(unused), shown)


def _note(notes: dict[int, frozenset[str]], address: int, names: frozenset[str], *, forget: bool) -> None:
    """What is known of a tensor that an operation made; new memory may lie where a freed tensor was."""
    if names:
        notes[address] = names
    elif forget:
        notes.pop(address, None)


def _stand_in(shape: tuple[int, ...], dtype: torch.dtype, nbytes: int) -> torch.Tensor:
    if nbytes <= _FILLED_NBYTES and dtype in _FLOATS:
        return torch.ones(shape, dtype=dtype, device="cpu")  # as scales are where there is nothing to scale
    if nbytes <= _FILLED_NBYTES:
        return torch.zeros(nbytes, dtype=torch.uint8, device="cpu").view(dtype).reshape(shape)
    return torch.empty(shape, dtype=dtype, device="cpu")


def _target(found: FoundTensor) -> _Target:
    return _Target(found, address_of(found.tensor), runs_of(found.tensor))


def _pattern(name: str) -> str:
    return _NUMERIC.sub("#", name)


def _renumbered(name: str, before: list[str], after: list[str]) -> str:
    """The name with the layer (and expert) numbers of one module exchanged for those of another."""
    numbers = iter(zip(before, after, strict=True))

    def exchange(found: re.Match[str]) -> str:
        was, becomes = next(numbers, (found[0], found[0]))
        return becomes if found[0] == was else found[0]

    return _NUMERIC.sub(exchange, name)


def _shown(names: frozenset[str]) -> str:
    return " and ".join(map(repr, sorted(names)))


def _may_convert(value: torch.dtype, target: torch.dtype) -> bool:
    """Between floats of 16 bits and more, and between integers; everything else would need a scale or lose a part."""
    if value == target or (value in _FLOATS and target in _FLOATS):
        return True
    return not any(each.is_floating_point or each.is_complex or each == torch.bool for each in (value, target))


def _narrows(value: torch.dtype, target: torch.dtype) -> bool:
    if value == target:
        return False
    if value in _FLOATS and target in _FLOATS:
        return torch.finfo(value).max > torch.finfo(target).max or torch.finfo(value).bits > torch.finfo(target).bits
    return True
