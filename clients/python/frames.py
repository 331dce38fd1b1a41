"""The frames a client sends in a session, made of plain values."""

from clients.python.request import PriorityLike, encode_priority
from vorrang.v1 import generation_pb2 as pb
from vorrang.v1 import types_pb2

#: Revision of the protocol this client was built for.
REVISION = 1


def open_frame(
    client_name: str,
    default_priority: PriorityLike | None,
    default_credit_tokens: int | None,
    resume_token: str,
) -> pb.SessionRequest:
    """Opens the session; None = the server's choice."""
    command = pb.OpenCommand(
        client_name=client_name,
        revision=REVISION,
        default_credit_tokens=default_credit_tokens,
        resume_session_token=resume_token,
    )
    if default_priority is not None:
        command.default_priority.CopyFrom(encode_priority(default_priority))
    return pb.SessionRequest(open=command)


def start_frame(request_id: str, spec: types_pb2.GenerationSpec) -> pb.SessionRequest:
    """Starts a request."""
    return pb.SessionRequest(start=pb.StartCommand(request_id=request_id, spec=spec))


def resume_frame(request_id: str, after_sequence: int) -> pb.SessionRequest:
    """Takes up a request of a lost session."""
    return pb.SessionRequest(resume=pb.ResumeCommand(request_id=request_id, after_sequence=after_sequence))


def cancel_frame(request_id: str) -> pb.SessionRequest:
    """Cancels a request."""
    return pb.SessionRequest(cancel=pb.CancelCommand(request_id=request_id))


def reprioritize_frame(request_id: str, priority: PriorityLike) -> pb.SessionRequest:
    """Changes a request's priority."""
    command = pb.ReprioritizeCommand(request_id=request_id, priority=encode_priority(priority))
    return pb.SessionRequest(reprioritize=command)


def credit_frame(request_id: str, num_tokens: int, acknowledged_sequence: int | None) -> pb.SessionRequest:
    """Grants output tokens and says what was kept; None = nothing is said of that."""
    command = pb.CreditCommand(
        request_id=request_id, tokens=num_tokens, acknowledged_sequence=acknowledged_sequence
    )
    return pb.SessionRequest(credit=command)


def pause_frame(request_id: str) -> pb.SessionRequest:
    """Stops a request's computation."""
    return pb.SessionRequest(pause=pb.PauseCommand(request_id=request_id))


def unpause_frame(request_id: str) -> pb.SessionRequest:
    """Lets a paused request go on."""
    return pb.SessionRequest(unpause=pb.UnpauseCommand(request_id=request_id))
