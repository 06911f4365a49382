"""A memory service that means harm: its clients raise in time, lose no descriptor, touch nothing that is not there."""

import fcntl
import os
import socket
import tempfile
import threading
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from modelexpress.errors import GmsError, ModelExpressError, NotAvailable, StaleGeneration
from modelexpress.gms.client import Imported, Segment, Staging, Where, drop, open_session, status
from modelexpress.gms.memory import HostMemory
from modelexpress.gms.protocol import (
    MAX_SEGMENTS,
    Allocated,
    Committed,
    Done,
    Granted,
    KeyStatus,
    Layout,
    Refused,
    StatusReply,
)
from modelexpress.gms.weights import Contents, Place, bind_model, contents_of, match_model
from modelexpress.manifest import Manifest, StorageSpec, TensorSpec
from tests.fuzz.inputs import frame, fuzzed, packed_near
from tests.gms.service import adapter_of
from tests.support.tensors import randomize

NBYTES = 8192  # two pages: the second is not there where a segment is too small
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def memfd(nbytes, seals):
    fd = os.memfd_create("fuzz", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.truncate(fd, nbytes)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@pytest.fixture(scope="module")
def descriptors():
    """What a service may send for a segment, the right ones among them. Kept open by the test."""
    pipe = os.pipe()
    fds = {
        "sealed": memfd(NBYTES, SEALS),
        "sealed small": memfd(100, SEALS),
        "sealed large": memfd(1 << 40, SEALS),
        "sealed empty": memfd(0, SEALS),
        "open": memfd(NBYTES, 0),
        "open empty": memfd(0, 0),
        "no growth": memfd(10, fcntl.F_SEAL_GROW),
        "null": os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC),
        "read-only": os.open("/proc/self/maps", os.O_RDONLY | os.O_CLOEXEC),
        "pipe": pipe[0],
        "other pipe": pipe[1],
        "folder": os.open("/", os.O_RDONLY | os.O_CLOEXEC),
    }
    yield fds
    for fd in fds.values():
        os.close(fd)


KINDS = ["sealed", "sealed", "sealed", "open", "open", "sealed small", "sealed large", "sealed empty", "open empty",
         "no growth", "null", "read-only", "pipe", "other pipe", "folder"]  # fmt: skip
BODY = b"body"
STATUS = StatusReply(1, "cpu", 0, 0, 1, (KeyStatus("n", "k", "", "committed", 1, NBYTES, 1, 0, 0, 0),))


def step(message):
    """A frame, right or near it, and the descriptors that ride behind it."""
    right = frame(msgspec.msgpack.encode(message))
    near = st.one_of(st.just(right), st.just(right), packed_near(message).map(frame))
    with_fds = isinstance(message, Allocated | Layout)
    few = st.sampled_from(KINDS).map(lambda kind: [kind])
    fds = st.one_of(few, few, st.lists(st.sampled_from(KINDS), max_size=4)) if with_fds else st.just([])
    return st.tuples(near, fds)


def script(*messages):
    return st.tuples(*map(step, messages)).map(list)


READING = script(Granted("read", 1, "i"), Layout(BODY, (NBYTES,)))
SCRIPTS = st.one_of(
    READING.map(lambda s: ("read", s)),
    script(Granted("read", 1, "i"), Layout(BODY, (NBYTES, NBYTES))).map(lambda s: ("read", s)),
    st.tuples(READING, READING).map(lambda pair: ("resume", [*pair[0], ([], []), *pair[1]])),
    script(Granted("stage", 1, "i"), Allocated(NBYTES), Done(), Committed(1)).map(lambda s: ("stage", s)),
    script(Granted("stage", 1, "i"), Allocated(NBYTES), Committed(1)).map(lambda s: ("write", s)),
    script(STATUS).map(lambda s: ("status", s)),
    script(Done()).map(lambda s: ("drop", s)),
    script(Refused("busy", "no")).map(lambda s: ("read", s)),
)


class HostileService:
    """Sends its script, whatever it is told; an empty step hangs up and waits for the next connection."""

    def __init__(self, path):
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self.scripts = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self):
        with suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                with sock, suppress(OSError):
                    sock.settimeout(5)
                    for data, fds in self.scripts.pop(0) if self.scripts else ():
                        sock.sendall(data)
                        if fds:
                            socket.send_fds(sock, [b"F"], fds)
                    sock.shutdown(socket.SHUT_WR)
                    while sock.recv(1 << 16):
                        pass

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(20)


@pytest.fixture(scope="module")
def hostile():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "gms.sock")
        with closing(HostileService(path)) as service:
            yield service, Where(str(path), "k", answer_s=3.0)


@contextmanager
def no_descriptor_more():
    before = set(os.listdir("/proc/self/fd"))
    yield
    left = set(os.listdir("/proc/self/fd")) - before
    # The service's own end of the last connection may still be closing.
    leaked = [link for fd in left if (link := _link(fd)) and not link.startswith("socket:")]
    assert not leaked, leaked


def _link(fd):
    with suppress(OSError):
        return os.readlink(f"/proc/self/fd/{fd}")
    return ""


def touch(imported):
    """Read and write every page; what is not there ends the process with SIGBUS."""
    segments = imported.take_segments()
    for segment in segments:
        if segment.mapping.nbytes <= 1 << 20:
            segment.tensor(0, segment.mapping.nbytes).add_(1)
    return segments


def act(what, where):
    backend = HostMemory()
    if what == "status":
        assert isinstance(status(where.path), StatusReply)
    elif what == "drop":
        drop(where)
    elif what in ("read", "resume"):
        imported = open_session(where, "RO", backend, wait_s=0.0)
        with closing(imported):
            if isinstance(imported, Imported):
                with suppress(GmsError):
                    contents_of(imported.body, [])
                segments = touch(imported)
                if what == "resume":
                    imported.pause()
                    imported.resume()
                    for segment in segments:
                        segment.tensor(0, segment.mapping.nbytes).add_(1)
    else:
        staging = open_session(where, "RW", backend, wait_s=0.0)
        with closing(staging):
            if not isinstance(staging, Staging):
                return
            if what == "stage":
                source = torch.arange(NBYTES, dtype=torch.uint8)
                segment = staging.add(NBYTES, [(source.data_ptr(), 0, NBYTES)])
                assert torch.equal(segment.tensor(0, NBYTES), source) or segment.tensor(0, NBYTES) is not None
                staging.release(segment)
            else:
                staging.add_writable(NBYTES).tensor(0, NBYTES).fill_(7)
            with closing(staging.commit("label", BODY)) as imported:
                touch(imported)


@fuzzed
@given(SCRIPTS)
@example(("read", [(frame(msgspec.msgpack.encode(Granted("read", 1, "i"))), []),
                   (frame(msgspec.msgpack.encode(Layout(BODY, (1,) * (MAX_SEGMENTS + 1)))), ["sealed"])]))  # fmt: skip
@example(("read", [(frame(b"\x83\xa4type\xa6layout\xa4body\xc4\0\xa8segments\xdd\xff\xff\xff\xff"), [])]))
@example(("write", [(frame(msgspec.msgpack.encode(Granted("stage", 1, "i"))), []),
                    (frame(msgspec.msgpack.encode(Allocated(NBYTES))), ["no growth"])]))  # fmt: skip
def test_no_service_harms_its_client(hostile, descriptors, scripted):
    service, where = hostile
    what, steps = scripted
    sent = [(data, [descriptors[kind] for kind in fds]) for data, fds in steps]
    ends = next((at for at, (data, _) in enumerate(sent) if not data), len(sent))
    service.scripts = [sent[:ends], sent[ends + 1 :]]
    with no_descriptor_more(), suppress(GmsError, NotAvailable, StaleGeneration):
        act(what, where)


def test_a_generation_that_comes_back_smaller_is_not_mapped(hostile, descriptors):
    """The same instance and number, and a segment of 100 bytes for one of a page: reading on was a SIGBUS."""
    service, where = hostile
    granted = (frame(msgspec.msgpack.encode(Granted("read", 1, "i"))), [])
    service.scripts = [
        [granted, (frame(msgspec.msgpack.encode(Layout(BODY, (nbytes,)))), [descriptors[kind]])]
        for nbytes, kind in ((NBYTES, "sealed"), (100, "sealed small"))
    ]
    with closing(open_session(where, "RO", HostMemory(), wait_s=0.0)) as imported:
        segments = touch(imported)
        imported.pause()
        with pytest.raises(GmsError, match="other segments than this generation had"):
            imported.resume()
        assert imported.paused
    del segments


# What a writer says about its segments


class Small(nn.Module):
    """A tie, a buffer and a parameter: quick to build, and each needs its own way to be bound."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Parameter(torch.zeros(4, 2))
        self.head = self.embedding
        self.bias = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        self.register_buffer("scale", torch.zeros(5, dtype=torch.float16))


def model_contents(kind="layout"):
    """What a writer of a Small says, with every storage at the start of a segment of its own."""
    adapter, model = adapter_of(Small), randomize(Small(), 1)
    manifest = adapter.manifest(model)
    if kind == "checkpoint":
        manifest = Manifest(manifest.storages, tuple(each for each in manifest.tensors if each.name != "head"))
    places = tuple(Place(at, 0) for at in range(len(manifest.storages)))
    return Contents(adapter.identity(), kind, manifest, places, b"")


CONTENTS = {kind: model_contents(kind) for kind in ("layout", "checkpoint")}


@fuzzed
@given(st.one_of(*(packed_near(each) for each in CONTENTS.values())), st.booleans())
def test_what_a_writer_says_is_refused_or_bound_within_its_segments(body, on_meta):
    sizes = [storage.nbytes for storage in CONTENTS["layout"].manifest.storages]
    try:
        contents = contents_of(body, sizes)
    except GmsError:
        return
    adapter = adapter_of(Small)
    with torch.device("meta" if on_meta else "cpu"):
        module = Small()
    segments = []
    for nbytes in sizes:
        fd = memfd(nbytes, SEALS)
        segments.append(Segment(HostMemory().map(fd, nbytes)))
        os.close(fd)
    spans = [(each.mapping.address, each.mapping.address + each.mapping.nbytes) for each in segments]
    try:
        binding = match_model(contents, adapter, module)
        bind_model(contents, binding, segments)
    except ModelExpressError:
        return
    for tensor in (*module.parameters(), *module.buffers()):
        assert not tensor.is_meta
        start, storage = tensor.data_ptr(), tensor.untyped_storage()
        if any(low <= start < high for low, high in spans):
            assert any(low <= start and start + tensor.nbytes <= high for low, high in spans)
        assert tensor.storage_offset() * tensor.element_size() + tensor.nbytes <= storage.nbytes()


def test_raw_tensors_that_overlap_are_not_bound():
    """As for peers: what is paired by name alone has to have as many bytes as its shape."""
    good = CONTENTS["checkpoint"]
    first = next(each for each in good.manifest.tensors if each.shape and each.storage >= 0)
    wide = msgspec.structs.replace(first, stride=(0,) * len(first.shape))
    tensors = tuple(wide if each is first else each for each in good.manifest.tensors)
    hostile = msgspec.structs.replace(good, manifest=Manifest(good.manifest.storages, tensors))
    sizes = [storage.nbytes for storage in good.manifest.storages]

    contents_of(msgspec.msgpack.encode(good), sizes)
    with pytest.raises(GmsError, match=r"raw tensor .* has strides"):
        contents_of(msgspec.msgpack.encode(hostile), sizes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="that device is there")
def test_a_generation_on_a_gpu_that_is_not_here_is_not_available():
    """An AssertionError of torch went up, when some tensors were bound already."""
    good = CONTENTS["layout"]
    storages = tuple(msgspec.structs.replace(each, device="cuda:0") for each in good.manifest.storages)
    manifest = Manifest(storages, good.manifest.tensors, good.manifest.scalars)

    with pytest.raises(NotAvailable, match="tensors on cuda:0, which cannot be used here"):
        match_model(msgspec.structs.replace(good, manifest=manifest), adapter_of(Small), Small())


@pytest.mark.parametrize("device", ["file", "meta", "xla:0"])
def test_a_generation_on_a_device_that_no_service_has_is_refused(device):
    manifest = Manifest((StorageSpec(4, 1, device),), (TensorSpec("w", 0, 0, (4,), (1,), "uint8", "buffer"),))
    contents = msgspec.structs.replace(CONTENTS["layout"], manifest=manifest, places=(Place(0, 0),))

    with pytest.raises(GmsError, match=r"device|files"):
        contents_of(msgspec.msgpack.encode(contents), [4])
