import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.rpc import status_pb2 as _status_pb2
from vorrang.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SessionRequest(_message.Message):
    __slots__ = ("open", "start", "cancel", "reprioritize", "credit", "pause", "unpause", "resume")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    REPRIORITIZE_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    UNPAUSE_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    open: OpenCommand
    start: StartCommand
    cancel: CancelCommand
    reprioritize: ReprioritizeCommand
    credit: CreditCommand
    pause: PauseCommand
    unpause: UnpauseCommand
    resume: ResumeCommand
    def __init__(self, open: _Optional[_Union[OpenCommand, _Mapping]] = ..., start: _Optional[_Union[StartCommand, _Mapping]] = ..., cancel: _Optional[_Union[CancelCommand, _Mapping]] = ..., reprioritize: _Optional[_Union[ReprioritizeCommand, _Mapping]] = ..., credit: _Optional[_Union[CreditCommand, _Mapping]] = ..., pause: _Optional[_Union[PauseCommand, _Mapping]] = ..., unpause: _Optional[_Union[UnpauseCommand, _Mapping]] = ..., resume: _Optional[_Union[ResumeCommand, _Mapping]] = ...) -> None: ...

class OpenCommand(_message.Message):
    __slots__ = ("client_name", "revision", "default_priority", "default_credit_tokens", "resume_session_token")
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_CREDIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESUME_SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    client_name: str
    revision: int
    default_priority: _types_pb2.Priority
    default_credit_tokens: int
    resume_session_token: str
    def __init__(self, client_name: _Optional[str] = ..., revision: _Optional[int] = ..., default_priority: _Optional[_Union[_types_pb2.Priority, _Mapping]] = ..., default_credit_tokens: _Optional[int] = ..., resume_session_token: _Optional[str] = ...) -> None: ...

class StartCommand(_message.Message):
    __slots__ = ("request_id", "spec")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    spec: _types_pb2.GenerationSpec
    def __init__(self, request_id: _Optional[str] = ..., spec: _Optional[_Union[_types_pb2.GenerationSpec, _Mapping]] = ...) -> None: ...

class CancelCommand(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ReprioritizeCommand(_message.Message):
    __slots__ = ("request_id", "priority")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    priority: _types_pb2.Priority
    def __init__(self, request_id: _Optional[str] = ..., priority: _Optional[_Union[_types_pb2.Priority, _Mapping]] = ...) -> None: ...

class CreditCommand(_message.Message):
    __slots__ = ("request_id", "tokens", "acknowledged_sequence")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tokens: int
    acknowledged_sequence: int
    def __init__(self, request_id: _Optional[str] = ..., tokens: _Optional[int] = ..., acknowledged_sequence: _Optional[int] = ...) -> None: ...

class PauseCommand(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class UnpauseCommand(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ResumeCommand(_message.Message):
    __slots__ = ("request_id", "after_sequence")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    after_sequence: int
    def __init__(self, request_id: _Optional[str] = ..., after_sequence: _Optional[int] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("request_id", "sequence", "opened", "accepted", "queue_update", "started", "delta", "preempted", "resumed", "priority_changed", "finished", "failed", "command_rejected", "go_away", "prompt_logprobs", "output_finished", "output_index")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    QUEUE_UPDATE_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_CHANGED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    COMMAND_REJECTED_FIELD_NUMBER: _ClassVar[int]
    GO_AWAY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FINISHED_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_INDEX_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    sequence: int
    opened: OpenedEvent
    accepted: AcceptedEvent
    queue_update: QueueUpdateEvent
    started: StartedEvent
    delta: DeltaEvent
    preempted: PreemptedEvent
    resumed: ResumedEvent
    priority_changed: PriorityChangedEvent
    finished: FinishedEvent
    failed: FailedEvent
    command_rejected: CommandRejectedEvent
    go_away: GoAwayEvent
    prompt_logprobs: PromptLogprobsEvent
    output_finished: FinishedEvent
    output_index: int
    def __init__(self, request_id: _Optional[str] = ..., sequence: _Optional[int] = ..., opened: _Optional[_Union[OpenedEvent, _Mapping]] = ..., accepted: _Optional[_Union[AcceptedEvent, _Mapping]] = ..., queue_update: _Optional[_Union[QueueUpdateEvent, _Mapping]] = ..., started: _Optional[_Union[StartedEvent, _Mapping]] = ..., delta: _Optional[_Union[DeltaEvent, _Mapping]] = ..., preempted: _Optional[_Union[PreemptedEvent, _Mapping]] = ..., resumed: _Optional[_Union[ResumedEvent, _Mapping]] = ..., priority_changed: _Optional[_Union[PriorityChangedEvent, _Mapping]] = ..., finished: _Optional[_Union[FinishedEvent, _Mapping]] = ..., failed: _Optional[_Union[FailedEvent, _Mapping]] = ..., command_rejected: _Optional[_Union[CommandRejectedEvent, _Mapping]] = ..., go_away: _Optional[_Union[GoAwayEvent, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobsEvent, _Mapping]] = ..., output_finished: _Optional[_Union[FinishedEvent, _Mapping]] = ..., output_index: _Optional[int] = ...) -> None: ...

class OpenedEvent(_message.Message):
    __slots__ = ("session_token", "limits", "default_level", "default_credit_tokens", "policy", "server_version")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_LEVEL_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_CREDIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    session_token: str
    limits: _types_pb2.Limits
    default_level: int
    default_credit_tokens: int
    policy: str
    server_version: str
    def __init__(self, session_token: _Optional[str] = ..., limits: _Optional[_Union[_types_pb2.Limits, _Mapping]] = ..., default_level: _Optional[int] = ..., default_credit_tokens: _Optional[int] = ..., policy: _Optional[str] = ..., server_version: _Optional[str] = ...) -> None: ...

class AcceptedEvent(_message.Message):
    __slots__ = ("level", "capped", "requested_level", "queue_position", "priority_ignored", "prompt_tokens", "seed")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    CAPPED_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_LEVEL_FIELD_NUMBER: _ClassVar[int]
    QUEUE_POSITION_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_IGNORED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    level: int
    capped: bool
    requested_level: int
    queue_position: int
    priority_ignored: bool
    prompt_tokens: int
    seed: int
    def __init__(self, level: _Optional[int] = ..., capped: bool = ..., requested_level: _Optional[int] = ..., queue_position: _Optional[int] = ..., priority_ignored: bool = ..., prompt_tokens: _Optional[int] = ..., seed: _Optional[int] = ...) -> None: ...

class QueueUpdateEvent(_message.Message):
    __slots__ = ("queue_position",)
    QUEUE_POSITION_FIELD_NUMBER: _ClassVar[int]
    queue_position: int
    def __init__(self, queue_position: _Optional[int] = ...) -> None: ...

class StartedEvent(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class DeltaEvent(_message.Message):
    __slots__ = ("token_ids", "text", "logprobs", "first_token_index")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_INDEX_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.PositionLogprobs]
    first_token_index: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[_types_pb2.PositionLogprobs, _Mapping]]] = ..., first_token_index: _Optional[int] = ...) -> None: ...

class PromptLogprobsEvent(_message.Message):
    __slots__ = ("first_token_index", "positions")
    FIRST_TOKEN_INDEX_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    first_token_index: int
    positions: _containers.RepeatedCompositeFieldContainer[_types_pb2.PositionLogprobs]
    def __init__(self, first_token_index: _Optional[int] = ..., positions: _Optional[_Iterable[_Union[_types_pb2.PositionLogprobs, _Mapping]]] = ...) -> None: ...

class PreemptedEvent(_message.Message):
    __slots__ = ("reason", "count")
    REASON_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    reason: _types_pb2.PreemptReason
    count: int
    def __init__(self, reason: _Optional[_Union[_types_pb2.PreemptReason, str]] = ..., count: _Optional[int] = ...) -> None: ...

class ResumedEvent(_message.Message):
    __slots__ = ("recomputed_tokens",)
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    recomputed_tokens: int
    def __init__(self, recomputed_tokens: _Optional[int] = ...) -> None: ...

class PriorityChangedEvent(_message.Message):
    __slots__ = ("level", "capped", "priority_ignored")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    CAPPED_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_IGNORED_FIELD_NUMBER: _ClassVar[int]
    level: int
    capped: bool
    priority_ignored: bool
    def __init__(self, level: _Optional[int] = ..., capped: bool = ..., priority_ignored: bool = ...) -> None: ...

class FinishedEvent(_message.Message):
    __slots__ = ("reason", "usage", "stop_string", "stop_token_id")
    REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    reason: _types_pb2.FinishReason
    usage: _types_pb2.Usage
    stop_string: str
    stop_token_id: int
    def __init__(self, reason: _Optional[_Union[_types_pb2.FinishReason, str]] = ..., usage: _Optional[_Union[_types_pb2.Usage, _Mapping]] = ..., stop_string: _Optional[str] = ..., stop_token_id: _Optional[int] = ...) -> None: ...

class FailedEvent(_message.Message):
    __slots__ = ("status", "retryable", "usage")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    status: _status_pb2.Status
    retryable: bool
    usage: _types_pb2.Usage
    def __init__(self, status: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., retryable: bool = ..., usage: _Optional[_Union[_types_pb2.Usage, _Mapping]] = ...) -> None: ...

class CommandRejectedEvent(_message.Message):
    __slots__ = ("status", "command")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    status: _status_pb2.Status
    command: str
    def __init__(self, status: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., command: _Optional[str] = ...) -> None: ...

class GoAwayEvent(_message.Message):
    __slots__ = ("time_left", "message")
    TIME_LEFT_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    time_left: _duration_pb2.Duration
    message: str
    def __init__(self, time_left: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., message: _Optional[str] = ...) -> None: ...

class GenerateStreamRequest(_message.Message):
    __slots__ = ("spec", "request_id")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    spec: _types_pb2.GenerationSpec
    request_id: str
    def __init__(self, spec: _Optional[_Union[_types_pb2.GenerationSpec, _Mapping]] = ..., request_id: _Optional[str] = ...) -> None: ...

class GenerateStreamResponse(_message.Message):
    __slots__ = ("sequence", "accepted", "queue_update", "started", "delta", "preempted", "resumed", "priority_changed", "finished", "prompt_logprobs", "output_finished", "output_index")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    QUEUE_UPDATE_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_CHANGED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FINISHED_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_INDEX_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    accepted: AcceptedEvent
    queue_update: QueueUpdateEvent
    started: StartedEvent
    delta: DeltaEvent
    preempted: PreemptedEvent
    resumed: ResumedEvent
    priority_changed: PriorityChangedEvent
    finished: FinishedEvent
    prompt_logprobs: PromptLogprobsEvent
    output_finished: FinishedEvent
    output_index: int
    def __init__(self, sequence: _Optional[int] = ..., accepted: _Optional[_Union[AcceptedEvent, _Mapping]] = ..., queue_update: _Optional[_Union[QueueUpdateEvent, _Mapping]] = ..., started: _Optional[_Union[StartedEvent, _Mapping]] = ..., delta: _Optional[_Union[DeltaEvent, _Mapping]] = ..., preempted: _Optional[_Union[PreemptedEvent, _Mapping]] = ..., resumed: _Optional[_Union[ResumedEvent, _Mapping]] = ..., priority_changed: _Optional[_Union[PriorityChangedEvent, _Mapping]] = ..., finished: _Optional[_Union[FinishedEvent, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobsEvent, _Mapping]] = ..., output_finished: _Optional[_Union[FinishedEvent, _Mapping]] = ..., output_index: _Optional[int] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("spec", "request_id")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    spec: _types_pb2.GenerationSpec
    request_id: str
    def __init__(self, spec: _Optional[_Union[_types_pb2.GenerationSpec, _Mapping]] = ..., request_id: _Optional[str] = ...) -> None: ...

class GenerateOutput(_message.Message):
    __slots__ = ("text", "token_ids", "logprobs", "finished")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.PositionLogprobs]
    finished: FinishedEvent
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_types_pb2.PositionLogprobs, _Mapping]]] = ..., finished: _Optional[_Union[FinishedEvent, _Mapping]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("text", "token_ids", "logprobs", "finished", "accepted", "prompt_logprobs", "outputs")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.PositionLogprobs]
    finished: FinishedEvent
    accepted: AcceptedEvent
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.PositionLogprobs]
    outputs: _containers.RepeatedCompositeFieldContainer[GenerateOutput]
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_types_pb2.PositionLogprobs, _Mapping]]] = ..., finished: _Optional[_Union[FinishedEvent, _Mapping]] = ..., accepted: _Optional[_Union[AcceptedEvent, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_types_pb2.PositionLogprobs, _Mapping]]] = ..., outputs: _Optional[_Iterable[_Union[GenerateOutput, _Mapping]]] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("prompt",)
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    prompt: _types_pb2.Prompt
    def __init__(self, prompt: _Optional[_Union[_types_pb2.Prompt, _Mapping]] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("token_ids", "skip_special_tokens")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    skip_special_tokens: bool
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., skip_special_tokens: bool = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ("name", "context_tokens", "vocabulary_size", "has_chat_template", "eos_token_ids", "limits", "architecture", "adapters")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    context_tokens: int
    vocabulary_size: int
    has_chat_template: bool
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    limits: _types_pb2.Limits
    architecture: str
    adapters: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., context_tokens: _Optional[int] = ..., vocabulary_size: _Optional[int] = ..., has_chat_template: bool = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., limits: _Optional[_Union[_types_pb2.Limits, _Mapping]] = ..., architecture: _Optional[str] = ..., adapters: _Optional[_Iterable[str]] = ...) -> None: ...
