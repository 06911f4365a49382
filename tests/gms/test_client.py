"""What a process is told whose memory service goes away, is silent or talks nonsense in the middle of an exchange."""

import socket
import struct
import threading
from contextlib import contextmanager

import pytest

from modelexpress.errors import GmsError
from modelexpress.gms.client import Where, open_session, status
from modelexpress.gms.memory import HostMemory


@contextmanager
def answering(path, answer):
    """A socket at `path` where `answer` is called with one connection, which is closed after it."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve():
            connection, _ = listener.accept()
            with connection:
                answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield str(path)
        finally:
            thread.join(20)


def hangs_up_unread(connection):
    """As the kernel does for a killed process that had not read its mail: the client sees a reset."""
    connection.recv(1)


def cuts_its_message(connection):
    connection.recv(1 << 16)
    connection.sendall(struct.pack("!I", 100) + b"half")


def talks_nonsense(connection):
    connection.recv(1 << 16)
    connection.sendall(struct.pack("!I", 4) + b"junk")


def is_silent(connection):
    connection.recv(1 << 16)
    connection.recv(1)  # until the client gives up


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (hangs_up_unread, "went away"),
        (cuts_its_message, "went away after 4 of 100 bytes"),
        (talks_nonsense, "no message of this protocol"),
        (is_silent, "took too long"),
    ],
)
def test_the_error_names_the_service_and_the_next_step(tmp_path, answer, said):
    with answering(tmp_path / "sock", answer) as path:
        where = Where(path, "k", answer_s=0.5)
        with pytest.raises(GmsError, match=said) as raised:
            open_session(where, "RO", HostMemory(), wait_s=0.0)

    assert f"the memory service at {path}" in str(raised.value)
    assert "see whether it still runs" in str(raised.value)


def test_so_does_a_question_for_its_status(tmp_path):
    with answering(tmp_path / "sock", hangs_up_unread) as path, pytest.raises(GmsError, match=f"at {path}"):
        status(path)
