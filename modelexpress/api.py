"""load() and publish(): the calls of modelexpress, each wired from one Config."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path

import msgspec
import torch
from torch import nn

from modelexpress.adapter import CheckpointAdapter, EngineAdapter, ModuleAdapter
from modelexpress.checkpoint.content_digest import content_digest
from modelexpress.checkpoint.index import CheckpointIndex, open_index
from modelexpress.config import Config, resolve_config
from modelexpress.discovery import manifest_of
from modelexpress.errors import (
    ConfigError,
    GmsError,
    ModelExpressError,
    NotAvailable,
    RegistryError,
    describe,
    in_flight,
    raise_interrupt,
)
from modelexpress.gms.backend import device_of, memory_backend
from modelexpress.gms.client import Imported, Staging, Where, open_session
from modelexpress.gms.memory import HostMemory
from modelexpress.gms.weights import publish_model
from modelexpress.host_transport import HostTransport
from modelexpress.identity import content_of, label, module_identity
from modelexpress.manifest import NO_STORAGE, Manifest, StorageSpec, content_key
from modelexpress.model_root import ModelRoot
from modelexpress.peer_transport import PeerTransport
from modelexpress.plan import plan_checkpoint
from modelexpress.registry.base import Registry
from modelexpress.registry.open import open_registry
from modelexpress.source import Served, WeightSource
from modelexpress.strategies.base import Attempt, LoadReport, LoadStrategy, LoadTarget, Outcome
from modelexpress.strategies.chain import LoadStrategyChain
from modelexpress.strategies.disk import DiskCheckpoint, open_files
from modelexpress.strategies.gms import GmsImport
from modelexpress.strategies.rdma import RdmaFromPeer
from modelexpress.tcp_transport import TcpTransport
from modelexpress.transport import Transport

logger = logging.getLogger(__name__)

Checkpoint = str | PathLike[str]
Progress = Callable[[int], None]


def load(
    model: nn.Module | Callable[[], nn.Module],
    checkpoint: Checkpoint,
    *,
    initialize: Callable[[], nn.Module] | None = None,
    derive: Callable[[nn.Module], object] | None = None,
    progress: Progress | None = None,
    **options: object,
) -> LoadReport:
    """Fill `model` with the weights of `checkpoint`, by the fastest way that works now.

    Every persistent parameter and buffer of the model must be in the checkpoint, and nothing else, with
    the same shape and dtype; ties stay tied. Loaded weights alias no file and no other process.

    Args:
        model: a module, or a function without arguments that builds it. After a failed attempt left a
            mixture behind, the model is rebuilt in place; a bare module cannot be, unless `initialize` is given.
        checkpoint: folder or file of safetensors. With `revision=` given it need not be readable, as long
            as a peer serves the revision.
        initialize: builds a fresh model; the module that was passed takes over its state.
        derive: called with the model after raw checkpoint tensors were read into it, to renew what it
            computes from weights and keeps outside of parameters and persistent buffers.
        progress: called with the bytes that just arrived, from any thread.
        **options: the fields of Config.

    Raises:
        ConfigError: an option, or the call, is wrong; nothing was touched.
        LoadFailed: no way worked; `report` says why, one attempt after the other. The model is unusable
            where an attempt says that bytes were moving.
        RecoveryFailed: the model could not be rebuilt after a failed attempt.
    """
    config = resolve_config(options)
    path = _path(checkpoint)
    build = initialize if isinstance(model, nn.Module) else model
    adapter = ModuleAdapter(build, lambda: module_identity(path, config), derive)
    first = (lambda: model) if isinstance(model, nn.Module) else adapter.initialize
    return load_root(adapter, first, path, config, progress=progress)


def load_checkpoint(checkpoint: Checkpoint, *, progress: Progress | None = None, **options: object) -> LoadReport:
    """Load a checkpoint's tensors as they are; the report's model has one parameter for each.

    Raises: as `load`.
    """
    config = resolve_config(options)
    path = _path(checkpoint)
    adapter = CheckpointAdapter(path, lambda: module_identity(path, config))
    return load_root(adapter, adapter.initialize, path, config, progress=progress)


def keep_checkpoint(checkpoint: Checkpoint, *, progress: Progress | None = None, **options: object) -> tuple[int, int]:
    """Put a checkpoint's raw tensors into the memory service of `gms=`; returns its generation and its bytes.

    Models that are filled by name import it, by its content digest, or by `revision` where one is given. The
    files are read into this process first, and moved tensor by tensor.

    Raises:
        ConfigError: an option is wrong, or gms is missing.
        LoadFailed: the files are wrong.
        NotAvailable, GmsError: the service is not there, or has no memory left.
    """
    config = resolve_config(options)
    if config.gms is None:
        raise ConfigError("gms is not set; give the socket of the memory service")
    path = _path(checkpoint)
    open_index(path)  # what is wrong with the files is said before anything else
    identity = module_identity(path, config)
    adapter = CheckpointAdapter(path, lambda: identity)
    direct = config.direct_reads != "off"
    files = DiskCheckpoint(path, threads=config.threads, verify=config.verify, direct=direct)
    target = LoadTarget(adapter, ModelRoot(adapter.initialize()), progress)
    where = Where(config.gms, identity.content_key, answer_s=config.connect_timeout_s)
    granted = open_session(where, "RW", HostMemory(), wait_s=config.connect_timeout_s)
    with closing(granted):
        report = LoadStrategyChain([files]).run(target)
        if isinstance(granted, Imported) or report.model is None:
            raise GmsError("the memory service let a session read that asked to stage")
        kept = publish_model(
            granted,
            adapter,
            report.model,
            kind="checkpoint",
            label=label(path, config),
            checksums=config.verify != "off",
            threads=config.threads,
        )
        kept.close()
    return kept.generation, report.nbytes


def load_root(
    adapter: EngineAdapter,
    root: Callable[[], nn.Module],
    checkpoint: Path,
    config: Config,
    *,
    progress: Progress | None = None,
) -> LoadReport:
    """Run the default chain on an engine's root, and publish the result where the config asks for it.

    Args:
        root: gives the module to fill; called when the services are known to be usable.
    """
    return fill_root(adapter, root, checkpoint, config, progress=progress).publish()


def fill_root(
    adapter: EngineAdapter,
    root: Callable[[], nn.Module],
    checkpoint: Path,
    config: Config,
    *,
    progress: Progress | None = None,
    fetch: Callable[[], Path] | None = None,
) -> Filled:
    """The first half of `load_root`: an engine publishes when it allocates nothing in memory of its own any more.

    Args:
        fetch: brings the checkpoint to this machine and says where; called when it is the turn of the disk.
    """
    named = _digest_of(checkpoint, config) if fetch is None else None
    with default_chain(config, checkpoint, fetch=fetch) as chain:
        report = chain.run(LoadTarget(adapter, ModelRoot(root()), progress))
        gms = next((each for each in chain.strategies if isinstance(each, GmsImport)), None)
        imported = gms.imported if gms is not None else None
        preloaded_nbytes = gms.preloaded_nbytes if gms is not None else 0
        broken = any(each.strategy == "gms" and each.outcome == "failed" for each in report.attempts)
        keeps = config.publish and config.gms is not None and not (imported or broken)
        staging = gms.take_staging() if gms is not None and keeps else None
    report = replace(report, imported=imported, preloaded_nbytes=preloaded_nbytes)
    return Filled(adapter, checkpoint, config, report, keeps, staging, named)


@dataclass(frozen=True, slots=True)
class Filled:
    """A loaded root that is not published yet.

    Attributes:
        keeps: whether its weights go into the memory service.
        staging: the claim of this process to put them there, where it has one already.
        named: the digest of the files before they were read, where they go by it.
    """

    adapter: EngineAdapter
    checkpoint: Path
    config: Config
    report: LoadReport
    keeps: bool
    staging: Staging | None
    named: str | None = None

    def publish(self) -> LoadReport:
        """Move the weights into the memory service and offer them to peers, where the config asks for it.

        The load stands either way; what could not be published is a warning.
        """
        model, config, imported = self.report.model, self.config, self.report.imported
        if model is None:
            return self.report
        if (
            self.named is not None
            and self.report.strategy == "disk"
            and self.named != _digest_of(self.checkpoint, config)
        ):
            logger.warning(
                "%s changed while it was loaded: what was loaded has no name, and is not published", self.checkpoint
            )
            self.close()
            return self.report
        if self.keeps and config.gms is not None:
            imported = _keep_in_service(self.adapter, model, config.gms, self.staging, self.checkpoint, config)
        publication = None
        if config.publish and config.registry is not None:
            publication = offer_to_peers(self.adapter, model, self.checkpoint, config)
        return replace(self.report, imported=imported, publication=publication)

    def close(self) -> None:
        """Give up the claim: nothing will be published."""
        if self.staging is not None:
            self.staging.close()


def _digest_of(checkpoint: Path, config: Config) -> str | None:
    """What files that are to be published go by, where that is the digest of their content."""
    if not config.publish or config.revision is not None:
        return None
    with suppress(NotAvailable):
        return content_of(checkpoint, config)[1]
    return None


def _keep_in_service(
    adapter: EngineAdapter, model: nn.Module, path: str, staging: Staging | None, checkpoint: Path, config: Config
) -> Imported | None:
    """Move a loaded model into the memory service, unless its weights are there by now. The load stands either way."""
    outer = in_flight()
    try:
        where = Where(path, adapter.identity().key, answer_s=config.connect_timeout_s)
        granted = staging or open_session(where, "RW_OR_RO", memory_backend(device_of(model)), wait_s=0.0)
        if isinstance(granted, Imported):
            granted.close()
            return None
        return publish_model(
            granted,
            adapter,
            model,
            kind="layout",
            label=label(checkpoint, config),
            checksums=config.verify != "off",
            threads=config.threads,
        )
    except Exception as exc:  # noqa: BLE001 - whatever it is, the model is loaded and right
        raise_interrupt(exc, outer=outer)
        logger.warning("the model is loaded, and the memory service could not keep it: %s", describe(exc))
        return None


def offer_to_peers(adapter: EngineAdapter, model: nn.Module, checkpoint: Path, config: Config) -> WeightSource | None:
    """A source of a loaded model, published unless the config waits for the engine; None where it cannot be one."""
    try:
        source = _layout_source(adapter, model, checkpoint, config)
        if config.publish_when == "loaded":
            source.publish()
    except ModelExpressError as exc:
        logger.warning("the model is loaded, and could not be published: %s", describe(exc))
        return None
    return source


@contextmanager
def publish(model: nn.Module, checkpoint: Checkpoint, **options: object) -> Iterator[WeightSource]:
    """Serve a loaded model to other processes while the block runs.

    Args:
        model: its weights are final; wrap what changes them in `source.updating()`.
        checkpoint: where they are from; with `revision=` the name by which targets find them.
        **options: the fields of Config; `registry` is needed.

    Raises:
        ConfigError: an option is wrong or `registry` is missing.
        NotAvailable: this machine or this model cannot be a source; says why.
        RegistryError: the registry could not be told.
    """
    config = resolve_config(options)
    _require_registry(config)
    path = _path(checkpoint)
    with _layout_source(ModuleAdapter(None, lambda: module_identity(path, config)), model, path, config) as source:
        yield source


@contextmanager
def serve_checkpoint(
    checkpoint: Checkpoint, *, progress: Progress | None = None, **options: object
) -> Iterator[WeightSource]:
    """Read a checkpoint into memory and serve its raw tensors while the block runs.

    It is found by its content digest, and by `revision` where one is given.

    Raises: as `publish`, and CheckpointError for the files.
    """
    config = resolve_config(options)
    _require_registry(config)
    path = _path(checkpoint)
    index = open_index(path)
    keys = [content_key("", content_digest(index, threads=config.threads))]
    if config.revision is not None:
        keys.append(content_key(*content_of(path, config)))
    manifest, owner = _into_memory(index, config, progress)

    def rename(revision: str) -> tuple[tuple[str, ...], str]:
        renamed = replace(config, revision=revision)
        return (content_key(*content_of(path, renamed)),), label(path, renamed)

    served = Served(lambda: (manifest, owner), tuple(keys), "checkpoint", label(path, config), rename)
    with _source(served, config) as source:
        yield source


@contextmanager
def default_chain(
    config: Config, checkpoint: Path, *, fetch: Callable[[], Path] | None = None
) -> Iterator[LoadStrategyChain]:
    """The chain that `config` asks for, with the services it needs; they are closed after the block.

    A strategy that cannot work here is left out, and the report says why.
    """
    strategies: list[LoadStrategy] = []
    refused: list[Attempt] = []
    with ExitStack() as services:
        for name in config.strategies:
            if name == "disk":
                files = DiskCheckpoint(
                    checkpoint,
                    threads=config.threads,
                    verify=config.verify,
                    fetch=fetch,
                    direct=config.direct_reads != "off",
                )
                strategies.append(files)
            elif name == "gms" and config.gms is not None:
                importing = GmsImport(
                    config.gms,
                    None,
                    claims=config.publish,
                    wait_s=config.transfer_timeout_s,
                    answer_s=config.connect_timeout_s,
                    standby=config.takeover_lock is not None and not config.publish,
                )
                strategies.append(services.enter_context(closing(importing)))
            elif name == "gms":
                refused.append(_not_tried(name, "off", "no memory service is set"))
            elif config.registry is None:
                refused.append(_not_tried(name, "off", "no registry is set"))
            else:
                try:
                    strategies.append(_rdma(config, services))
                except (NotAvailable, RegistryError) as exc:
                    refused.append(_not_tried(name, "unavailable", describe(exc)))
        yield LoadStrategyChain(strategies, strict=config.strict, refused=refused)


def peer_transport(config: Config) -> Callable[[], Transport]:
    """What opens the transports of the config.

    Raises:
        NotAvailable: NIXL is the only one, and is not installed or cannot be imported here.
    """
    ways: dict[str, Callable[[], Transport]] = {
        "host": lambda: HostTransport(lanes=config.threads),
        "nixl": lambda: nixl_transport(config),
        "tcp": lambda: TcpTransport(
            lanes=config.threads, connect_timeout_s=config.connect_timeout_s, listen=config.listen
        ),
    }
    if config.transports == ("nixl",):
        nixl_transport(config).close()
    return lambda: PeerTransport({name: ways[name] for name in config.transports})


def nixl_transport(config: Config) -> Transport:
    """A NIXL transport; it makes its agents when they are needed.

    Raises:
        NotAvailable: NIXL is not installed or cannot be imported here.
    """
    try:
        from modelexpress.nixl_transport import NixlTransport
    except ImportError as exc:
        raise NotAvailable(f"NIXL cannot be imported ({exc}); pip install 'modelexpress[nixl]'") from exc
    return NixlTransport(lanes=config.threads, connect_timeout_s=config.connect_timeout_s)


def registry_of(config: Config) -> Registry:
    """Open the registry that the config names."""
    return open_registry(
        _require_registry(config),
        signing_key=config.signing_key.encode() if config.signing_key is not None else None,
        timeout_s=config.connect_timeout_s,
        lease_ttl_s=config.lease_ttl_s,
    )


def _rdma(config: Config, services: ExitStack) -> LoadStrategy:
    open_transport = peer_transport(config)
    registry = services.enter_context(closing(registry_of(config)))
    return RdmaFromPeer(
        registry,
        open_transport,
        verify=config.verify,
        transfer_timeout_s=config.transfer_timeout_s,
        max_sources=config.max_sources,
        max_readers=config.max_readers,
        together=not config.strict,
    )


def _not_tried(strategy: str, outcome: Outcome, reason: str) -> Attempt:
    return Attempt(strategy=strategy, source=None, outcome=outcome, error=reason, nbytes=0, seconds=0.0)


def _layout_source(adapter: EngineAdapter, model: nn.Module, checkpoint: Path, config: Config) -> WeightSource:
    keys = (adapter.identity().key,)

    def rename(revision: str) -> tuple[tuple[str, ...], str]:
        renamed = replace(config, revision=revision)
        model_now, revision_now = content_of(checkpoint, renamed)
        identity = msgspec.structs.replace(adapter.identity(), model=model_now, revision=revision_now)
        return (identity.key,), label(checkpoint, renamed)

    served = Served(lambda: _memory_of(adapter, model), keys, "layout", label(checkpoint, config), rename)
    return _source(served, config)


def _memory_of(adapter: EngineAdapter, model: nn.Module) -> tuple[Manifest, object]:
    found = adapter.tensors(model)
    # The storages and not the tensors: `model.half()` gives a parameter other memory and frees this one.
    return manifest_of(found.tensors, found.scalars), [each.tensor.untyped_storage() for each in found.tensors]


def _source(served: Served, config: Config) -> WeightSource:
    return WeightSource(
        served,
        lambda: registry_of(config),
        peer_transport(config),
        checksums=config.verify != "off",
        threads=config.threads,
        lease_ttl_s=config.lease_ttl_s,
    )


def _into_memory(
    index: CheckpointIndex, config: Config, progress: Progress | None
) -> tuple[Manifest, list[torch.Tensor]]:
    """Each shard's data as one block of memory, and the manifest of it."""
    blocks = [torch.empty(shard.nbytes - shard.data_offset, dtype=torch.uint8, device="cpu") for shard in index.shards]
    kept = [at for at, block in enumerate(blocks) if block.numel()]
    storages = tuple(StorageSpec(blocks[at].numel(), blocks[at].data_ptr(), "cpu") for at in kept)
    tensors = tuple(
        tensor
        if tensor.storage == NO_STORAGE
        else msgspec.structs.replace(
            tensor,
            storage=kept.index(tensor.storage),
            offset=tensor.offset - index.shards[tensor.storage].data_offset,
        )
        for tensor in index.manifest.tensors
    )
    manifest = Manifest(storages, tensors)
    direct = config.direct_reads != "off"
    files = open_files(index, threads=config.threads, verify=config.verify, progress=progress, direct=direct)
    files.read(plan_checkpoint(index.manifest, manifest))
    return manifest, blocks


def _path(checkpoint: Checkpoint) -> Path:
    if not isinstance(checkpoint, (str, PathLike)) or not str(checkpoint):
        raise ConfigError(f"checkpoint is {checkpoint!r}; give the path of a folder or file")
    return Path(checkpoint)


def _require_registry(config: Config) -> str:
    if config.registry is None:
        raise ConfigError("registry is not set; give one like file:///run/user/1000/modelexpress or redis://host:6379")
    return config.registry
