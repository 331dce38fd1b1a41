"""Messages between the two processes: whole, in order, and errors as they were."""

import pickle
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ContextExceeded, InternalError
from engine.models.errors import UnsupportedModel
from engine.runner.channel import BlockingChannel, FrameReader, RemoteError, frame, pack_error, unpack_error

messages = st.lists(st.tuples(st.text(max_size=5), st.binary(max_size=300)), max_size=20)


@given(messages=messages, cuts=st.lists(st.integers(1, 50), max_size=50))
def test_messages_arrive_whole_however_the_bytes_are_cut(messages, cuts):
    data = b"".join(map(frame, messages))
    reader, received = FrameReader(), []
    for size in [*cuts, len(data)]:
        received += reader.feed(data[:size])
        data = data[size:]
    assert received == messages


def test_the_far_end_reads_what_was_framed_and_sees_the_end():
    ours, theirs = socket.socketpair()
    channel = BlockingChannel(theirs)
    large = ("plan", list(range(200_000)))
    writer = threading.Thread(target=lambda: (ours.sendall(frame(("a",)) + frame(large)), ours.close()))
    writer.start()
    assert channel.receive() == ("a",)
    assert channel.receive() == large
    assert channel.receive() is None
    writer.join()
    with pytest.raises(OSError):  # noqa: PT011, PT012 - a broken pipe or a reset
        for _ in range(3):
            channel.send(("too late",))
    theirs.close()


@pytest.mark.parametrize(
    "error",
    [
        InternalError("f00d"),
        ContextExceeded("prompt", "must be short", 5),
        UnsupportedModel("architecture", "Llama", "Mamba"),
        KeyError("x"),
    ],
)
def test_an_error_arrives_as_it_was_whatever_its_constructor_wants(error):
    made = unpack_error(pickle.loads(pickle.dumps(pack_error(error))))
    assert type(made) is type(error)
    assert str(made) == str(error)
    notes = made.__dict__.pop("__notes__", None)
    assert made.__dict__ == error.__dict__
    assert (notes is None) == isinstance(error, (InternalError, ContextExceeded))


def test_an_error_that_can_not_be_sent_arrives_in_words():
    error = RuntimeError("open:", lambda: 1)
    assert isinstance(unpack_error(pack_error(error)), RemoteError)
    assert "RuntimeError" in str(unpack_error(pack_error(error)))
