"""The faults: for each kind and victim, what is done. What can go on later is returned as a call that lets it."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from modelexpress.offer import decode_offer
from tests.faults import actors, cell
from tests.faults.actors import Actor, Died
from tests.faults.limits import MemoryGroup
from tests.faults.scenario import Kind, Victim

if TYPE_CHECKING:
    from tests.faults.stage import Stage

Resume = Callable[[], None] | None
Blow = Callable[["Stage"], Resume]

_MIB = 1 << 20

# What a jump of the server's clock does to what Redis holds, seen from outside: all that ends, ends so much earlier.
# Keys end by their TTL, readers and index entries by the scores of their sets.
_JUMP = """
local ms = tonumber(ARGV[1])
for _, key in ipairs(redis.call('KEYS', 'mx1:*')) do
  local ttl = redis.call('PTTL', key)
  if redis.call('TYPE', key)['ok'] == 'zset' then
    for _, member in ipairs(redis.call('ZRANGE', key, 0, -1)) do redis.call('ZINCRBY', key, -ms, member) end
  end
  if ttl - ms > 0 then redis.call('PEXPIRE', key, ttl - ms) else redis.call('DEL', key) end
end
"""


class Impossible(Exception):
    """This machine cannot make the fault; the message says why."""


def _source(stage: Stage) -> Actor:
    number = stage.scenario.fault.number
    stage.outcome.struck.append(stage.outcome.sources[number])
    return stage.sources[number]


def _killed(actor: Actor | None) -> Resume:
    assert actor is not None
    actor.kill()
    return None


def _stopped(actor: Actor | None) -> Resume:
    assert actor is not None
    actor.signal(signal.SIGSTOP)
    return partial(actor.signal, signal.SIGCONT)


def _drop_source(stage: Stage) -> Resume:
    _source(stage)
    cell.reset_connections(of=stage.networks[stage.scenario.fault.number].pid)
    return None


def _cut_off_source(stage: Stage) -> Resume:
    _source(stage)
    number = stage.scenario.fault.number
    holder = stage.networks[number].pid

    def cut(on: bool) -> None:
        cell.black_hole(f"v{number}", on=on)
        cell.black_hole("eth0", of=holder, on=on)

    cut(True)
    return partial(cut, False)


def _limit_memory(pid: int, more_nbytes: int) -> None:
    """Let a process have so many bytes of addresses more than it has now."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + more_nbytes
    resource.prlimit(pid, resource.RLIMIT_AS, (most, most))


def _flip_in_memory(stage: Stage, source: Actor, name: str) -> None:
    """Change one bit of what a source serves, behind its back."""
    with closing(stage.registry()) as registry:
        found = [each.record for each in registry.find(None) if each.record.name == name]
        offer = decode_offer(registry.offer(found[0]))
    size = stage.scenario.fault.size
    storage = offer.manifest.storages[int(size * len(offer.manifest.storages))]
    place = storage.address + int(size * 7919) * 4099 % storage.nbytes
    with open(f"/proc/{source.pid}/mem", "r+b", buffering=0) as memory:
        memory.seek(place)
        byte = memory.read(1)[0]
        memory.seek(place)
        memory.write(bytes([byte ^ (1 << (place % 8))]))


def _flip_source(stage: Stage) -> Resume:
    source = _source(stage)
    _flip_in_memory(stage, source, stage.outcome.struck[-1])
    return None


def _restart_source(stage: Stage) -> Resume:
    """Another process at the same address with other weights: under the same revision, or under their own."""
    fault = stage.scenario.fault
    _source(stage).kill()
    revision = "r1" if fault.same_name else "r2"
    new = stage.start_source(fault.number, stage.folder / "other", revision=revision)
    stage.outcome.sources.append(stage.published(new))
    return None


def _limit_source(stage: Stage) -> Resume:
    _limit_memory(_source(stage).pid, int(stage.scenario.fault.size * 16 * _MIB))
    return None


def _limit_target(stage: Stage) -> Resume:
    assert stage.target is not None
    _limit_memory(stage.target.pid, int(stage.scenario.fault.size * 2 * stage.outcome.nbytes))
    return None


def _limit_service(stage: Stage) -> Resume:
    """Less memory than the weights take, while a writer moves them there."""
    assert stage.service is not None
    most = 8 * _MIB + int(stage.scenario.fault.size * stage.outcome.nbytes * 0.8)
    try:
        stage.group = MemoryGroup(stage.service.pid, most)
    except OSError as exc:
        raise Impossible(f"no memory group can be made here: {exc}") from exc
    return None


def _restart_service(stage: Stage) -> Resume:
    _killed(stage.service)
    stage.start_service()
    return None


def _kill_redis(stage: Stage) -> Resume:
    assert stage.redis is not None
    stage.redis.stop()
    return None


def _stop_redis(stage: Stage) -> Resume:
    assert stage.redis is not None
    stage.redis.freeze()
    return stage.redis.thaw


def _restart_redis(stage: Stage) -> Resume:
    assert stage.redis is not None
    stage.redis.restart()
    return None


def _flush_redis(stage: Stage) -> Resume:
    assert stage.redis is not None
    with closing(stage.redis.client) as client:
        client.flushall()
    return None


def _tell_relay(stage: Stage, what: str) -> None:
    assert stage.relay is not None
    with suppress(Died):
        stage.relay.pipe.send(say=what)
        stage.relay.pipe.receive(10)


def _drop_redis(stage: Stage) -> Resume:
    _tell_relay(stage, "drop")
    return None


def _cut_off_redis(stage: Stage) -> Resume:
    _tell_relay(stage, "keep")
    return partial(_tell_relay, stage, "move")


def _jump_redis(stage: Stage) -> Resume:
    """An hour or two forward, or back; the sources' own clocks do not move."""
    assert stage.redis is not None
    ms = stage.jump_s() * (1000 if stage.scenario.fault.size >= 0.3 else -1000)
    with closing(stage.redis.client) as client:
        client.eval(_JUMP, 0, ms)
    return None


def _jump_registry(stage: Stage) -> Resume:
    """Whose clock is off was started like that."""
    return None


def _fill_disk(folder: Path, *, leave_nbytes: int = 0) -> None:
    """Write until there is no room left."""
    with open(folder / "filler", "wb", buffering=0) as filler, suppress(OSError):
        while True:
            filler.write(bytes(4096))
    if leave_nbytes:
        os.truncate(folder / "filler", max(0, (folder / "filler").stat().st_size - leave_nbytes))


def _fill_registry(stage: Stage) -> Resume:
    """The target can write no lease, and who wants to publish is told."""
    _fill_disk(stage.folder / "registry")
    late = stage.start_source(stage.scenario.peers, stage.origin)
    stage.sources.pop()
    stage.outcome.work = stage.hear(late)
    with suppress(BrokenPipeError):
        late.pipe.send(say="end")  # where it could publish after all: a reader that ended made room
    late.wait(10)
    return None


def _fill_save(stage: Stage) -> Resume:
    """Too small from the beginning, or full while it is written."""
    room = stage.folder / "room"
    room.mkdir()
    size = stage.scenario.fault.size
    nbytes = stage.outcome.nbytes
    small = size < 0.5
    cell.mount("tmpfs", room, f"size={max(1 << 16, int(nbytes * (size if small else 1.2)))}")
    saver = stage.start("saver", actors.writes, "save", path=stage.socket, folder=str(room / "saved"))
    if not small:
        time.sleep((size - 0.5) * 0.1)
        _fill_disk(room)
    stage.outcome.work = stage.hear(saver)
    saver.wait(10)
    (room / "filler").unlink(missing_ok=True)
    left = os.listdir(room)
    if stage.outcome.work.get("error") is not None:
        stage.outcome.left += [f"{each} is left where nothing could be saved" for each in left]
    return None


def _fill_checksums(stage: Stage) -> Resume:
    _fill_disk(stage.model, leave_nbytes=int(stage.scenario.fault.size * 4096) // 4096 * 4096)
    recorder = stage.start("recorder", actors.writes, "record", path="", folder=str(stage.model))
    stage.outcome.work = stage.hear(recorder)
    recorder.wait(10)
    (stage.model / "filler").unlink(missing_ok=True)
    return None


def _shard(stage: Stage) -> Path:
    shards = sorted(stage.model.glob("*.safetensors"))
    return shards[int(stage.scenario.fault.size * 97) % len(shards)]


def _cut_file(stage: Stage) -> Resume:
    shard = _shard(stage)
    os.truncate(shard, int(shard.stat().st_size * stage.scenario.fault.size))
    return None


def _flip_file(stage: Stage) -> Resume:
    shard = _shard(stage)
    with open(shard, "r+b") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        place = start + int(stage.scenario.fault.size * (shard.stat().st_size - start - 1))
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ (1 << (place % 8))]))
    return None


BLOWS: Mapping[tuple[Kind, Victim], Blow] = {
    ("kill", "source"): lambda stage: _killed(_source(stage)),
    ("stop", "source"): lambda stage: _stopped(_source(stage)),
    ("drop", "source"): _drop_source,
    ("black hole", "source"): _cut_off_source,
    ("flip", "source"): _flip_source,
    ("restart", "source"): _restart_source,
    ("memory", "source"): _limit_source,
    ("kill", "target"): lambda stage: _killed(stage.target),
    ("stop", "target"): lambda stage: _stopped(stage.target),
    ("memory", "target"): _limit_target,
    ("kill", "service"): lambda stage: _killed(stage.service),
    ("stop", "service"): lambda stage: _stopped(stage.service),
    ("restart", "service"): _restart_service,
    ("memory", "service"): _limit_service,
    ("kill", "writer"): lambda stage: _killed(stage.writer),
    ("stop", "writer"): lambda stage: _stopped(stage.writer),
    ("kill", "redis"): _kill_redis,
    ("stop", "redis"): _stop_redis,
    ("restart", "redis"): _restart_redis,
    ("flush", "redis"): _flush_redis,
    ("drop", "redis"): _drop_redis,
    ("black hole", "redis"): _cut_off_redis,
    ("clock jump", "redis"): _jump_redis,
    ("clock jump", "registry"): _jump_registry,
    ("full disk", "registry"): _fill_registry,
    ("full disk", "save"): _fill_save,
    ("full disk", "checksums"): _fill_checksums,
    ("cut", "file"): _cut_file,
    ("flip", "file"): _flip_file,
    ("none", "nobody"): lambda stage: None,
}
