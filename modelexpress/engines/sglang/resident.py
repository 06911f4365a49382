"""ResidentWeights: the weights of one model while an engine lives on them, from its load to its end.

They are offered to others, change, sleep and wake. What may happen is a table; whatever fails on the way leads to a
phase whose weights are known to be right, or to one that answers nothing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import nn

from modelexpress.api import Filled, offer_to_peers
from modelexpress.checkpoint.base import CheckpointTensors
from modelexpress.checkpoint.index import open_index
from modelexpress.config import Config
from modelexpress.devices import bind_thread
from modelexpress.digest import checksums_of
from modelexpress.discovery import dtype_name, manifest_of
from modelexpress.errors import CheckpointError, ModelExpressError, NotAvailable, describe
from modelexpress.gms.client import Imported, drop
from modelexpress.gms.weights import Moved, make_private
from modelexpress.manifest import NO_STORAGE, Manifest, TensorSpec
from modelexpress.source import WeightSource
from modelexpress.strategies.disk import open_files

if TYPE_CHECKING:
    from modelexpress.engines.sglang.adapter import SglangAdapter
    from modelexpress.engines.sglang.failover import Role

_P = ParamSpec("_P")
_R = TypeVar("_R")

logger = logging.getLogger(__name__)

# What a configuration says beside the architecture, and trainers write as they like. SGLang keeps what it read first.
_NOT_THE_ARCHITECTURE = frozenset(
    {
        *("_name_or_path", "name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "_attn_implementation", "output_attentions"),
    }
)


class Phase(StrEnum):
    """What the weights are; the value is how it reads in a message."""

    SERVING = "serving"
    UPDATING = "being updated"
    ASLEEP = "asleep"
    LOST = "lost"  # the memory is there, and what is in it is not known: only an update helps


# What may be done, in which phases.
_ALLOWED: Mapping[str, frozenset[Phase]] = {
    "updated": frozenset({Phase.SERVING, Phase.LOST}),
    "put to sleep": frozenset({Phase.SERVING, Phase.LOST}),
    "woken": frozenset({Phase.ASLEEP}),
}


@dataclass(frozen=True, slots=True)
class _Fingerprint:
    """What the bytes of a model were: where which tensor lies, and a checksum of each piece."""

    layout: str
    checksums: bytes

    @property
    def digest(self) -> bytes:
        """The same in a few bytes."""
        return hashlib.sha256(self.layout.encode() + b"\0" + self.checksums).digest()

    @classmethod
    def of(
        cls, adapter: SglangAdapter, model: nn.Module, threads: int, *, without: Imported | None = None
    ) -> _Fingerprint | None:
        """None where something about the model cannot be described, so that nothing can be compared.

        Args:
            without: a generation whose bytes cannot change, and are not read.
        """
        try:
            found = adapter.tensors(model)
            layout = manifest_of(found.tensors, found.scalars).layout_digest
        except NotAvailable as exc:
            logger.warning("the weights cannot be compared with themselves later: %s", describe(exc))
            return None
        open_to_change = [
            each for each in found.tensors if without is None or not without.holds(each.tensor.data_ptr())
        ]
        return cls(layout, checksums_of(manifest_of(tuple(open_to_change)), threads=threads))


@dataclass(frozen=True, slots=True)
class _Asleep:
    """What a model was when it was put to sleep. `sealed`: its generation, if all that it sees there is shared."""

    before: Phase
    fingerprint: _Fingerprint | None
    sealed: Imported | None
    offered: bool


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """New weights on this machine that were found to fit."""

    adapter: SglangAdapter
    tensors: CheckpointTensors
    config: Config
    folder: Path


@dataclass(slots=True)
class _Update:
    """One update while it runs. `checkpoint` is None where the engine brings tensors of its own."""

    checkpoint: Checkpoint | None
    before: Phase
    fingerprint: _Fingerprint | None
    moved: Moved
    offered: bool
    given: dict[str, TensorSpec] = field(default_factory=dict)  # what the engine brought and was checked
    revision: str | None = None  # what the engine's tensors are called together
    changed: bool = False
    broken: str | None = None
    doubted: str | None = None  # why some of its tensors may be written in part, unknown to us


def _one_at_a_time(step: Callable[_P, _R]) -> Callable[_P, _R]:
    """A standby's watcher publishes from a thread of its own, while the engine's may begin an update."""

    @wraps(step)
    def alone(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with args[0]._lock:  # type: ignore[attr-defined]  # the method's own object
            return step(*args, **kwargs)

    return alone


class ResidentWeights:
    """The weights of one model in one process. For the thread that the engine serves from, but for `serve_as`.

    Args:
        filled: what the load ended with.
        locate: the folder of a model's name or path, downloaded where it must be.
        loader: the class of SGLang's kind of loader that loads what `prepare` prepared.
        role: what this server is to others that name the same lock; None once it acts on it.
    """

    def __init__(
        self,
        filled: Filled,
        adapter: SglangAdapter,
        locate: Callable[[str], Path],
        *,
        loader: type | None = None,
        role: Role | None = None,
    ) -> None:
        self.loader = loader
        self.role = role
        self._lock = threading.RLock()
        self.report = filled.report
        self.phase = Phase.SERVING
        self._filled = filled
        self._adapter = adapter
        self._config = filled.config
        self._folder = filled.checkpoint
        self._from_files = True  # and not from tensors that an engine was given
        self._anonymous = False  # nobody gave the weights a name, so they are not published
        self._named: dict[str, bytes] = {}  # what was published as a revision before, by its digest
        self._locate = locate
        self._imported: Imported | None = filled.report.imported
        self._source: WeightSource | None = None
        self._update: _Update | None = None
        self._asleep: _Asleep | None = None
        self._lost: str | None = None

    @property
    def model(self) -> nn.Module:
        """The module that the engine holds."""
        if self.report.model is None:
            raise ModelExpressError("nothing was loaded, so there is nothing to keep")
        return self.report.model

    @property
    def imported(self) -> Imported | None:
        """The generation of a memory service under the parameters, if there is one."""
        return self._imported

    @property
    def source(self) -> WeightSource | None:
        """What offers the weights to peers, where they can be offered."""
        return self._source

    @property
    def updating(self) -> bool:
        """Whether an update began and did not end."""
        return self._update is not None

    @property
    def changed(self) -> bool:
        """Whether an update is running that has written something."""
        return self._update is not None and self._update.changed

    @property
    def broken(self) -> str | None:
        """Why the update that is running left the model half-written, if it did. May read all of it."""
        if self._update is None or self._update.broken or not self._update.doubted:
            return self._update.broken if self._update is not None else None
        return None if self._is_as_before(self._update) else self._update.doubted

    @property
    def lost(self) -> str | None:
        """Why the weights are not known any more, if they are not."""
        return self._lost

    def why_not_serving(self) -> str | None:
        """The reason to refuse a request now; None when the weights are right."""
        if self.phase is Phase.LOST:
            return f"the weights are lost ({self._lost}); update them with /update_weights_from_disk or restart"
        if self.phase is Phase.ASLEEP:
            return "the weights are asleep; wake them with /resume_memory_occupation"
        return None

    def why_unreadable(self) -> str | None:
        """The reason why nobody may look at the parameters: their memory is not there, and a look ends the process."""
        if self.phase is Phase.ASLEEP or (self._imported is not None and self._imported.paused):
            return self.why_not_serving() or "the memory of the weights is gone"
        return None

    # --- publications

    @_one_at_a_time
    def publish_loaded(self) -> None:
        """Publish what was loaded, as its config asks; with no memory region of the engine open."""
        self.report = self._filled.publish()
        self._imported = self.report.imported
        publication = self.report.publication
        self._source = publication if isinstance(publication, WeightSource) else None

    def give_up_publishing(self) -> None:
        """Nothing of this load will be published."""
        self._filled.close()

    @_one_at_a_time
    def offer(self) -> None:
        """The engine begins to serve: offer what waited for that."""
        if self._source is not None and not self._source.generation:
            self._publish(self._source)

    @_one_at_a_time
    def serve_as(self, config: Config) -> None:
        """From now on with these settings: what a standby that took over publishes, or not."""
        self._config = config
        self._offer_again(config.publish)

    @_one_at_a_time
    def withdraw(self) -> bool:
        """Let no peer find or accept the weights any more; returns whether any could."""
        if self._source is None or not self._source.published:
            return False
        logger.info("withdrawing %s: the weights are about to change or go", self._source.record.name)
        self._source.withdraw()
        return True

    # --- updates

    @_one_at_a_time
    def prepare(self, model_path: str, revision: str | None) -> Checkpoint:
        """Find out whether the weights of a folder or a hub's name fit into the model, all of them; changes nothing.

        Args:
            revision: what the new weights are published as; None: by the digest of their content.

        Raises:
            ModelExpressError: they do not fit, or the weights are asleep; names what is wrong.
        """
        self._require("updated")
        revision = revision or None
        folder = self._locate(model_path)
        index = open_index(folder)
        _require_same_architecture(self._folder, folder)
        if revision is not None and revision == self._config.revision and folder != self._folder:
            logger.warning(
                "revision %r names the old weights; the new ones go by the digest of their content", revision
            )
            revision = None
        config = replace(self._config, revision=revision)
        direct = config.direct_reads != "off"
        tensors = open_files(index, threads=config.threads, verify=config.verify, progress=None, direct=direct)
        adapter = self._adapter.for_update(folder, config)
        if config.publish:
            # Named while the files are those that will be read: what changes after `open_index` is not loaded.
            with suppress(ModelExpressError):  # what has no name is not published, and that is said then
                adapter.identity()
        rehearsed = adapter.rehearse(self.model, tensors.manifest, tensors.label)
        if self.phase is Phase.LOST and rehearsed.unfilled:
            raise CheckpointError(
                f"{tensors.label}: {min(rehearsed.unfilled)!r} was lost and is in no checkpoint; restart the server"
            )
        return Checkpoint(adapter, tensors, config, folder)

    @_one_at_a_time
    def begin(self, checkpoint: Checkpoint | None) -> None:
        """Before the first byte changes: withdraw every publication, and leave memory that others see.

        Raises:
            ModelExpressError: the weights are asleep, or are being updated.
            NotAvailable: they cannot leave the memory service; nothing changed but what is offered.
        """
        self._require("updated")
        offered = self.withdraw()
        try:
            fingerprint = self._fingerprint()
            if fingerprint is not None and self._config.revision is not None:
                self._named.setdefault(self._config.revision, fingerprint.digest)
            imported, moved = self._imported, self._go_private(keep=not self._has_files())
            if imported is not None and self._config.publish:
                _drop(imported)
        except Exception:
            self._offer_again(offered)
            raise
        if self.phase is Phase.LOST:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.zero_()  # what no checkpoint fills, like the padding of experts, is zero in a new model
        self._update = _Update(checkpoint, self.phase, fingerprint, moved, offered, changed=checkpoint is None)
        self.phase = Phase.UPDATING

    @_one_at_a_time
    def load_prepared(self) -> None:
        """Fill the model with the checkpoint that was prepared, as in a first load.

        Raises: as a load; the model is half-written then, and waits for `bring_back`.
        """
        update = self._running()
        if update.checkpoint is None:
            raise ModelExpressError("no checkpoint was prepared for this update")
        update.changed = True
        try:
            update.checkpoint.adapter.load_checkpoint(self.model, update.checkpoint.tensors)
            update.checkpoint.adapter.finalize(self.model, from_checkpoint=True)
        except Exception as exc:
            update.broken = describe(exc)
            raise

    def load_some(self, load: Callable[[Any], object], tensors: Any) -> object:
        """Let the engine load tensors that it was given, in a session of `begin` and `end`.

        Raises: what `load` raises; the model is half-written then.
        """
        update = self._running()
        try:
            return load(tensors)
        except Exception as exc:
            update.broken = describe(exc)
            raise

    def check_some(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Find out whether some tensors of a checkpoint fit into the model; changes nothing.

        Raises:
            CheckpointError: names the one that does not.
        """
        given = {name: _spec(name, tensor) for name, tensor in tensors}
        self._adapter.rehearse(self.model, Manifest((), tuple(given.values())), "these tensors", partly=True)
        self._running().given.update(given)

    def doubt(self, reason: str) -> None:
        """Something failed that may have written a part of what it was given: then the update does not stand."""
        if self._update is not None and self._update.doubted is None:
            self._update.doubted = reason

    def call_it(self, revision: str | None) -> None:
        """What weights that come from no checkpoint are published as, when the update ends; None: no news."""
        if revision and self._update is not None:
            self._update.revision = revision

    @_one_at_a_time
    def end(self, failure: str | None) -> str | None:
        """After an update: publish the new weights, or bring the old ones back. Returns what is wrong, if it is.

        Args:
            failure: why the update is not to stand, on whatever rank.
        """
        update = self._running()
        failure = failure or update.broken
        if failure is None and update.checkpoint is not None and update.changed:
            self._become(update.checkpoint)
        elif failure is None and self._is_as_before(update):
            self._stand(update.before, offered=update.offered)
        elif failure is None and update.doubted is not None:
            failure = update.doubted
        elif failure is None and (failure := self._what_is_missing(update)) is None:
            self._become_unnamed(update.revision)
        if failure is not None:
            return self._fall_back(update, failure)
        return None

    # --- sleep

    @_one_at_a_time
    def sleep(self) -> None:
        """Before the engine lets go of memory: withdraw, and remember what the bytes are.

        Raises:
            ModelExpressError: the weights are asleep or being updated.
        """
        self._require("put to sleep")
        offered = self.withdraw()
        try:
            sealed = self._imported if self._imported is not None and self._imported.is_as_sealed() else None
            self._asleep = _Asleep(self.phase, self._fingerprint(without=sealed), sealed, offered)
        except Exception:
            self._offer_again(offered)
            raise
        self.phase = Phase.ASLEEP

    def let_go(self) -> None:
        """Let go of the memory service's generation; addresses stay reserved."""
        if self._imported is not None:
            self._imported.pause()

    def come_back(self) -> str | None:
        """Map the memory service's generation again, where it was; returns why that could not be."""
        self._require("woken")
        bind_thread(str(self._adapter.device))
        try:
            if self._imported is not None:
                self._imported.resume()
        except ModelExpressError as exc:
            self._leave_reserved_memory()
            return describe(exc)
        return None

    def compare(self) -> str | None:
        """When all memory is there again: why the bytes are not those of before, if they are not."""
        self._require("woken")
        asleep = self._slept()
        if asleep.before is Phase.LOST:
            return self._lost
        now = _Fingerprint.of(self._adapter, self.model, self._config.threads, without=asleep.sealed)
        same = asleep.fingerprint is not None and asleep.fingerprint == now
        return None if same else "their memory came back with other bytes"

    @_one_at_a_time
    def woken(self, failure: str | None) -> None:
        """After every rank compared: serve and publish again, or answer nothing until an update."""
        asleep, self._asleep = self._slept(), None
        if failure is None:
            self._stand(Phase.SERVING, offered=asleep.offered)
        else:
            self.lose(failure)

    # --- what the phases are made of

    def _require(self, what: str) -> None:
        if self.phase not in _ALLOWED[what]:
            raise ModelExpressError(f"the weights cannot be {what} while they are {self.phase}")

    def _slept(self) -> _Asleep:
        if self._asleep is None:
            raise ModelExpressError("the weights are not asleep")
        return self._asleep

    def _running(self) -> _Update:
        if self._update is None:
            raise ModelExpressError("no update of the weights is running")
        return self._update

    def _fingerprint(self, without: Imported | None = None) -> _Fingerprint | None:
        """Of weights that are right; None where there is nothing to compare with later."""
        if self.phase is not Phase.SERVING:
            return None
        return _Fingerprint.of(self._adapter, self.model, self._config.threads, without=without)

    def _has_files(self) -> bool:
        """Whether the weights of now can be read again."""
        if not self._from_files:
            return False
        try:
            open_index(self._folder)
        except CheckpointError:
            return False
        return True

    def _go_private(self, *, keep: bool) -> Moved:
        if self._imported is None:
            return Moved(())
        if self._adapter.addresses_are_kept():
            raise NotAvailable(
                "CUDA graphs hold the addresses of weights that lie in the memory service, and an update gives them "
                "other ones; restart the server with the new weights, or start it with --disable-cuda-graph"
            )
        moved = make_private(self._adapter, self.model, self._imported, keep=keep)
        self._imported.close()
        self._imported = None
        logger.info("%d bytes left the memory service for private memory", moved.nbytes)
        return moved

    def _leave_reserved_memory(self) -> None:
        """The generation is gone. Zeros take its place: the engine may still look at its parameters."""
        with suppress(NotAvailable):  # then the addresses stay reserved, and touching them is a fault
            self._go_private(keep=False)

    def _is_as_before(self, update: _Update) -> bool:
        if not update.changed and update.checkpoint is not None:
            return True  # the engine refused before it began
        if update.fingerprint is None:
            return False
        return update.fingerprint == _Fingerprint.of(self._adapter, self.model, self._config.threads)

    def _what_is_missing(self, update: _Update) -> str | None:
        """Some tensors are an update of right weights, and no cure for lost ones."""
        if update.before is not Phase.LOST:
            return None
        try:
            self._adapter.rehearse(self.model, Manifest((), tuple(update.given.values())), "these tensors")
        except CheckpointError as exc:
            return describe(exc)
        return None

    def _become(self, checkpoint: Checkpoint) -> None:
        """The weights are those of a checkpoint, under its name."""
        self._adapter, self._config, self._folder = checkpoint.adapter, checkpoint.config, checkpoint.folder
        self._from_files = True
        self._source = None
        self._anonymous = self._is_taken(self._config.revision)
        self._stand(Phase.SERVING, offered=True)

    def _become_unnamed(self, revision: str | None) -> None:
        """The weights came from nowhere that could be read again; a name for them must be given."""
        named = revision is not None and revision != self._config.revision and not self._is_taken(revision)
        self._config = replace(self._config, revision=revision if named else None)
        self._adapter = self._adapter.for_update(self._folder, self._config)
        self._adapter.finalize(self.model, from_checkpoint=False)
        self._from_files = False
        self._source = None
        self._anonymous = not named
        if self._config.publish and not named:
            logger.warning("the new weights are not published: give them a name of their own as weight_version")
        self._stand(Phase.SERVING, offered=named)

    def _is_taken(self, revision: str | None) -> bool:
        """Whether a name stands for other weights than those of now: who asks for it would get these."""
        before = self._named.get(revision) if revision is not None else None
        if before is None:
            return False
        now = _Fingerprint.of(self._adapter, self.model, self._config.threads)
        if now is not None and now.digest == before:
            return False
        logger.warning("revision %r names other weights; the new ones are not published: give them a name", revision)
        return True

    def _fall_back(self, update: _Update, failure: str) -> str:
        """Bring the old weights back, and say what happened."""
        if not update.changed or self._is_as_before(update):
            self._stand(update.before, offered=update.offered)
            return failure
        try:
            self._bring_back(update)
        except Exception as exc:  # noqa: BLE001 - whatever it is, the model is half-written and must answer nothing
            self.lose(f"an update failed: {failure}; and the old weights did not come back: {describe(exc)}")
            return f"{failure}; the old weights could not be brought back ({describe(exc)}), requests are refused"
        self._stand(Phase.SERVING, offered=update.offered)
        return f"{failure}; the old weights are back"

    def _bring_back(self, update: _Update) -> None:
        if update.before is Phase.LOST:
            raise NotAvailable("there were none to go back to")
        if any(shared.numel() for _, shared in update.moved.storages):
            update.moved.bring_back()
        elif not self._from_files:
            raise NotAvailable("they came from no file")
        else:
            config = self._config
            index, direct = open_index(self._folder), config.direct_reads != "off"
            tensors = open_files(index, threads=config.threads, verify=config.verify, progress=None, direct=direct)
            self._adapter.load_checkpoint(self.model, tensors)
            self._adapter.finalize(self.model, from_checkpoint=True)
        if not self._is_as_before(update):
            raise CheckpointError(f"what was read from {self._folder} is not what was there before")

    def _stand(self, phase: Phase, *, offered: bool) -> None:
        self._update = None
        self.phase = phase
        if phase is Phase.SERVING:
            self._lost = None
            self._offer_again(offered)

    @_one_at_a_time
    def lose(self, reason: str) -> None:
        """The bytes are not known any more: answer nothing until an update."""
        self._update = None
        self.phase, self._lost = Phase.LOST, reason
        logger.error("requests are refused until the weights are updated: %s", reason)

    def _offer_again(self, offered: bool) -> None:
        config = self._config
        if not offered or self._anonymous or not config.publish or config.registry is None:
            return
        if self._source is None:
            waiting = replace(config, publish_when="ready")
            self._source = offer_to_peers(self._adapter, self.model, self._folder, waiting)
        if self._source is not None:
            self._publish(self._source)

    def _publish(self, source: WeightSource) -> None:
        try:
            source.publish()
        except ModelExpressError as exc:
            logger.warning("the model serves, and could not be published: %s", describe(exc))


def _drop(imported: Imported) -> None:
    try:
        drop(imported.where)
    except NotAvailable:
        pass  # gone, with or without its service
    except ModelExpressError as exc:  # others may go on to import it: it is what its name says
        logger.warning("the memory service keeps the old weights: %s", describe(exc))


def _spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    """A tensor as a rehearsal needs it: without a place."""
    shape = tuple(tensor.shape)
    return TensorSpec(name, NO_STORAGE, 0, shape, tuple(tensor.stride()), dtype_name(tensor), "parameter")


def _require_same_architecture(old: Path, new: Path) -> None:
    """A live update changes weights; what computes with them stays as the server started.

    Raises:
        CheckpointError: the configurations differ; names where.
    """
    ours, theirs = _configuration(old), _configuration(new)
    if ours is None or theirs is None:
        return  # one of them has none, and the tensors must speak for themselves
    differing = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
    if differing:
        shown = ", ".join(f"{key} ({ours.get(key)!r}, now {theirs.get(key)!r})" for key in differing[:5])
        raise CheckpointError(
            f"{new}: config.json is of another model in {len(differing)} fields, like {shown}; an update changes "
            "weights only, so restart the server with this folder"
        )


def _configuration(folder: Path) -> dict[str, object] | None:
    path = folder / "config.json"
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as exc:
        raise CheckpointError(f"{path}: cannot be read: {describe(exc)}") from exc
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: is a {type(found).__name__} where a JSON object is expected")
    return {key: value for key, value in found.items() if key not in _NOT_THE_ARCHITECTURE}
