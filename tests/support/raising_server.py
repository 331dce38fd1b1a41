"""``vorrang serve`` whose handlers raise: ``python -m tests.support.raising_server WHERE ARGUMENTS``.

What they raise holds, in words and in local variables, all that the caller sent.
WHERE is ``handlers`` (every call), ``frames`` (every frame of a session but an ``open`` that is not
named ``raise``) or ``submit`` (deep inside, on the way to the engine).
"""

import re
import sys
from typing import Any

from server.backend import Backend
from server.cli import main
from server.control import ControlService
from server.generation import GenerationService
from server.session_commands import SessionCommands
from vorrang.v1 import control_pb2, generation_pb2

SERVICES = {GenerationService: generation_pb2, ControlService: control_pb2}


def fail(*sent: Any) -> None:
    """Raise as a library would that quotes what it was given."""
    text = " ".join(str(one) for one in sent)
    try:
        raise KeyError(text)
    except KeyError as cause:
        error = ValueError(f"can't make sense of {text}")
        error.add_note(text)
        raise error from cause


def _patch_handlers() -> None:
    async def raising(_self: Any, request: Any, context: Any) -> None:
        metadata = context.invocation_metadata()
        fail(request, metadata)

    for service, module in SERVICES.items():
        (descriptor,) = module.DESCRIPTOR.services_by_name.values()
        for method in descriptor.methods:
            name = re.sub(r"(?<!^)(?=[A-Z])", "_", method.name).lower()
            assert hasattr(service, name)
            setattr(service, name, raising)


def _patch_frames() -> None:
    opened = SessionCommands._open

    def open_(self: Any, body: Any) -> Any:
        return fail(body) if body.client_name == "raise" else opened(self, body)

    async def start(self: Any, record: Any, body: Any) -> None:
        fail(body, record.token)

    def command(self: Any, record: Any, name: str, client_id: str, body: Any) -> None:
        fail(name, client_id, body, record.token)

    SessionCommands._open, SessionCommands._start = open_, start  # type: ignore[method-assign]
    SessionCommands._command = command  # type: ignore[method-assign]


def _patch_submit() -> None:
    def submit(self: Any, draft: Any, token_ids: Any, *rest: Any, **more: Any) -> None:
        fail(draft.prompt, list(token_ids), draft)

    Backend.submit = submit  # type: ignore[method-assign,assignment]


if __name__ == "__main__":
    {"handlers": _patch_handlers, "frames": _patch_frames, "submit": _patch_submit}[sys.argv.pop(1)]()
    main()
