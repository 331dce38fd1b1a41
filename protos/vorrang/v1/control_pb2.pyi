import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from vorrang.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RequestState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REQUEST_STATE_UNSPECIFIED: _ClassVar[RequestState]
    REQUEST_STATE_WAITING: _ClassVar[RequestState]
    REQUEST_STATE_PREFILL: _ClassVar[RequestState]
    REQUEST_STATE_DECODE: _ClassVar[RequestState]
    REQUEST_STATE_PREEMPTED: _ClassVar[RequestState]
    REQUEST_STATE_PARKED: _ClassVar[RequestState]

class HappeningKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HAPPENING_KIND_UNSPECIFIED: _ClassVar[HappeningKind]
    HAPPENING_KIND_ARRIVED: _ClassVar[HappeningKind]
    HAPPENING_KIND_ENDED: _ClassVar[HappeningKind]
    HAPPENING_KIND_PARKED: _ClassVar[HappeningKind]
    HAPPENING_KIND_UNPARKED: _ClassVar[HappeningKind]
    HAPPENING_KIND_LEVEL_CHANGED: _ClassVar[HappeningKind]
    HAPPENING_KIND_PREEMPTED: _ClassVar[HappeningKind]
    HAPPENING_KIND_COMPUTED: _ClassVar[HappeningKind]
REQUEST_STATE_UNSPECIFIED: RequestState
REQUEST_STATE_WAITING: RequestState
REQUEST_STATE_PREFILL: RequestState
REQUEST_STATE_DECODE: RequestState
REQUEST_STATE_PREEMPTED: RequestState
REQUEST_STATE_PARKED: RequestState
HAPPENING_KIND_UNSPECIFIED: HappeningKind
HAPPENING_KIND_ARRIVED: HappeningKind
HAPPENING_KIND_ENDED: HappeningKind
HAPPENING_KIND_PARKED: HappeningKind
HAPPENING_KIND_UNPARKED: HappeningKind
HAPPENING_KIND_LEVEL_CHANGED: HappeningKind
HAPPENING_KIND_PREEMPTED: HappeningKind
HAPPENING_KIND_COMPUTED: HappeningKind

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("version", "model", "policy", "discipline", "limits", "max_running_requests", "max_step_tokens", "block_size", "num_blocks", "started_at")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    DISCIPLINE_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    version: str
    model: str
    policy: str
    discipline: str
    limits: _types_pb2.Limits
    max_running_requests: int
    max_step_tokens: int
    block_size: int
    num_blocks: int
    started_at: _timestamp_pb2.Timestamp
    def __init__(self, version: _Optional[str] = ..., model: _Optional[str] = ..., policy: _Optional[str] = ..., discipline: _Optional[str] = ..., limits: _Optional[_Union[_types_pb2.Limits, _Mapping]] = ..., max_running_requests: _Optional[int] = ..., max_step_tokens: _Optional[int] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., started_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ClassLoad(_message.Message):
    __slots__ = ("class_name", "num_waiting", "num_running", "num_preempted", "num_parked")
    CLASS_NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    NUM_PARKED_FIELD_NUMBER: _ClassVar[int]
    class_name: str
    num_waiting: int
    num_running: int
    num_preempted: int
    num_parked: int
    def __init__(self, class_name: _Optional[str] = ..., num_waiting: _Optional[int] = ..., num_running: _Optional[int] = ..., num_preempted: _Optional[int] = ..., num_parked: _Optional[int] = ...) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("classes", "num_free_seats", "num_free_blocks", "num_blocks", "last_step", "num_steps", "draining", "num_computed_tokens", "num_output_tokens", "num_preemptions", "num_seats", "num_runner_losses")
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_SEATS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_SEATS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNER_LOSSES_FIELD_NUMBER: _ClassVar[int]
    classes: _containers.RepeatedCompositeFieldContainer[ClassLoad]
    num_free_seats: int
    num_free_blocks: int
    num_blocks: int
    last_step: _duration_pb2.Duration
    num_steps: int
    draining: bool
    num_computed_tokens: int
    num_output_tokens: int
    num_preemptions: int
    num_seats: int
    num_runner_losses: int
    def __init__(self, classes: _Optional[_Iterable[_Union[ClassLoad, _Mapping]]] = ..., num_free_seats: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_blocks: _Optional[int] = ..., last_step: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., num_steps: _Optional[int] = ..., draining: bool = ..., num_computed_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., num_seats: _Optional[int] = ..., num_runner_losses: _Optional[int] = ...) -> None: ...

class ListRequestsRequest(_message.Message):
    __slots__ = ("class_name", "page_size", "page_token")
    CLASS_NAME_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    class_name: str
    page_size: int
    page_token: str
    def __init__(self, class_name: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class RequestInfo(_message.Message):
    __slots__ = ("server_request_id", "request_id", "tenant", "level", "state", "usage", "age", "num_blocks", "label", "max_output_tokens", "num_computed_tokens", "num_known_tokens", "starved")
    SERVER_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_KNOWN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STARVED_FIELD_NUMBER: _ClassVar[int]
    server_request_id: str
    request_id: str
    tenant: str
    level: int
    state: RequestState
    usage: _types_pb2.Usage
    age: _duration_pb2.Duration
    num_blocks: int
    label: str
    max_output_tokens: int
    num_computed_tokens: int
    num_known_tokens: int
    starved: bool
    def __init__(self, server_request_id: _Optional[str] = ..., request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., level: _Optional[int] = ..., state: _Optional[_Union[RequestState, str]] = ..., usage: _Optional[_Union[_types_pb2.Usage, _Mapping]] = ..., age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., num_blocks: _Optional[int] = ..., label: _Optional[str] = ..., max_output_tokens: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ..., num_known_tokens: _Optional[int] = ..., starved: bool = ...) -> None: ...

class ListRequestsResponse(_message.Message):
    __slots__ = ("requests", "next_page_token")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RequestInfo]
    next_page_token: str
    def __init__(self, requests: _Optional[_Iterable[_Union[RequestInfo, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class CancelRequestRequest(_message.Message):
    __slots__ = ("server_request_id",)
    SERVER_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    server_request_id: str
    def __init__(self, server_request_id: _Optional[str] = ...) -> None: ...

class CancelRequestResponse(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: bool
    def __init__(self, found: bool = ...) -> None: ...

class UpdateRequestPriorityRequest(_message.Message):
    __slots__ = ("server_request_id", "priority")
    SERVER_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    server_request_id: str
    priority: _types_pb2.Priority
    def __init__(self, server_request_id: _Optional[str] = ..., priority: _Optional[_Union[_types_pb2.Priority, _Mapping]] = ...) -> None: ...

class UpdateRequestPriorityResponse(_message.Message):
    __slots__ = ("level",)
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    level: int
    def __init__(self, level: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("grace",)
    GRACE_FIELD_NUMBER: _ClassVar[int]
    grace: _duration_pb2.Duration
    def __init__(self, grace: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("num_running", "num_waiting")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ...) -> None: ...

class WatchDecisionsRequest(_message.Message):
    __slots__ = ("num_past_steps", "include_happenings")
    NUM_PAST_STEPS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_HAPPENINGS_FIELD_NUMBER: _ClassVar[int]
    num_past_steps: int
    include_happenings: bool
    def __init__(self, num_past_steps: _Optional[int] = ..., include_happenings: bool = ...) -> None: ...

class Happening(_message.Message):
    __slots__ = ("kind", "at", "server_request_id", "level", "end", "step", "preemption", "guesses")
    KIND_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    SERVER_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PREEMPTION_FIELD_NUMBER: _ClassVar[int]
    GUESSES_FIELD_NUMBER: _ClassVar[int]
    kind: HappeningKind
    at: _timestamp_pb2.Timestamp
    server_request_id: str
    level: int
    end: str
    step: int
    preemption: PreemptDecision
    guesses: _containers.RepeatedCompositeFieldContainer[Guesses]
    def __init__(self, kind: _Optional[_Union[HappeningKind, str]] = ..., at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., server_request_id: _Optional[str] = ..., level: _Optional[int] = ..., end: _Optional[str] = ..., step: _Optional[int] = ..., preemption: _Optional[_Union[PreemptDecision, _Mapping]] = ..., guesses: _Optional[_Iterable[_Union[Guesses, _Mapping]]] = ...) -> None: ...

class Guesses(_message.Message):
    __slots__ = ("server_request_id", "num_drafted", "num_accepted")
    SERVER_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    server_request_id: str
    num_drafted: int
    num_accepted: int
    def __init__(self, server_request_id: _Optional[str] = ..., num_drafted: _Optional[int] = ..., num_accepted: _Optional[int] = ...) -> None: ...

class GrantDecision(_message.Message):
    __slots__ = ("server_request_id", "num_computed_tokens", "num_tokens", "level", "samples")
    SERVER_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    server_request_id: str
    num_computed_tokens: int
    num_tokens: int
    level: int
    samples: bool
    def __init__(self, server_request_id: _Optional[str] = ..., num_computed_tokens: _Optional[int] = ..., num_tokens: _Optional[int] = ..., level: _Optional[int] = ..., samples: bool = ...) -> None: ...

class PreemptDecision(_message.Message):
    __slots__ = ("server_request_id", "reason", "beneficiary_id", "num_blocks", "num_lost_tokens")
    SERVER_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    BENEFICIARY_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    server_request_id: str
    reason: _types_pb2.PreemptReason
    beneficiary_id: str
    num_blocks: int
    num_lost_tokens: int
    def __init__(self, server_request_id: _Optional[str] = ..., reason: _Optional[_Union[_types_pb2.PreemptReason, str]] = ..., beneficiary_id: _Optional[str] = ..., num_blocks: _Optional[int] = ..., num_lost_tokens: _Optional[int] = ...) -> None: ...

class WatchDecisionsResponse(_message.Message):
    __slots__ = ("step", "planned_at", "grants", "preemptions", "bound_gate", "num_waiting", "num_free_blocks", "num_lost_steps", "happenings")
    STEP_FIELD_NUMBER: _ClassVar[int]
    PLANNED_AT_FIELD_NUMBER: _ClassVar[int]
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    BOUND_GATE_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOST_STEPS_FIELD_NUMBER: _ClassVar[int]
    HAPPENINGS_FIELD_NUMBER: _ClassVar[int]
    step: int
    planned_at: _timestamp_pb2.Timestamp
    grants: _containers.RepeatedCompositeFieldContainer[GrantDecision]
    preemptions: _containers.RepeatedCompositeFieldContainer[PreemptDecision]
    bound_gate: str
    num_waiting: int
    num_free_blocks: int
    num_lost_steps: int
    happenings: _containers.RepeatedCompositeFieldContainer[Happening]
    def __init__(self, step: _Optional[int] = ..., planned_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., grants: _Optional[_Iterable[_Union[GrantDecision, _Mapping]]] = ..., preemptions: _Optional[_Iterable[_Union[PreemptDecision, _Mapping]]] = ..., bound_gate: _Optional[str] = ..., num_waiting: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_lost_steps: _Optional[int] = ..., happenings: _Optional[_Iterable[_Union[Happening, _Mapping]]] = ...) -> None: ...

class ExplainRequestRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class Neighbour(_message.Message):
    __slots__ = ("server_request_id", "request_id", "level")
    SERVER_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    server_request_id: str
    request_id: str
    level: int
    def __init__(self, server_request_id: _Optional[str] = ..., request_id: _Optional[str] = ..., level: _Optional[int] = ...) -> None: ...

class LifeInterval(_message.Message):
    __slots__ = ("phase", "gate", "begin", "end")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    GATE_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    phase: str
    gate: str
    begin: _duration_pb2.Duration
    end: _duration_pb2.Duration
    def __init__(self, phase: _Optional[str] = ..., gate: _Optional[str] = ..., begin: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., end: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class LifePart(_message.Message):
    __slots__ = ("phase", "gate", "before_first_token", "after_first_token")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    GATE_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    phase: str
    gate: str
    before_first_token: _duration_pb2.Duration
    after_first_token: _duration_pb2.Duration
    def __init__(self, phase: _Optional[str] = ..., gate: _Optional[str] = ..., before_first_token: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., after_first_token: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class LifeLoss(_message.Message):
    __slots__ = ("at", "reason", "beneficiary", "num_blocks", "num_lost_tokens", "num_recomputed_tokens", "waited", "recompute", "resumed")
    AT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    BENEFICIARY_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAITED_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    at: _duration_pb2.Duration
    reason: _types_pb2.PreemptReason
    beneficiary: Neighbour
    num_blocks: int
    num_lost_tokens: int
    num_recomputed_tokens: int
    waited: _duration_pb2.Duration
    recompute: _duration_pb2.Duration
    resumed: bool
    def __init__(self, at: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., reason: _Optional[_Union[_types_pb2.PreemptReason, str]] = ..., beneficiary: _Optional[_Union[Neighbour, _Mapping]] = ..., num_blocks: _Optional[int] = ..., num_lost_tokens: _Optional[int] = ..., num_recomputed_tokens: _Optional[int] = ..., waited: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., recompute: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., resumed: bool = ...) -> None: ...

class ExplainRequestResponse(_message.Message):
    __slots__ = ("server_request_id", "request_id", "tenant", "label", "level", "class_name", "phase", "end", "delivered", "total", "ttft", "num_prompt_tokens", "num_cached_tokens", "num_output_tokens", "num_ahead", "num_seated", "seated", "num_holders", "holders", "num_prefill_steps", "num_decode_steps", "beside_prefill", "losses", "num_losses", "parts", "intervals", "num_intervals", "num_drafted_tokens", "num_accepted_tokens")
    SERVER_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    CLASS_NAME_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    DELIVERED_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    TTFT_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_AHEAD_FIELD_NUMBER: _ClassVar[int]
    NUM_SEATED_FIELD_NUMBER: _ClassVar[int]
    SEATED_FIELD_NUMBER: _ClassVar[int]
    NUM_HOLDERS_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILL_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODE_STEPS_FIELD_NUMBER: _ClassVar[int]
    BESIDE_PREFILL_FIELD_NUMBER: _ClassVar[int]
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    NUM_LOSSES_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    INTERVALS_FIELD_NUMBER: _ClassVar[int]
    NUM_INTERVALS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    server_request_id: str
    request_id: str
    tenant: str
    label: str
    level: int
    class_name: str
    phase: str
    end: str
    delivered: bool
    total: _duration_pb2.Duration
    ttft: _duration_pb2.Duration
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_ahead: int
    num_seated: int
    seated: _containers.RepeatedCompositeFieldContainer[Neighbour]
    num_holders: int
    holders: _containers.RepeatedCompositeFieldContainer[Neighbour]
    num_prefill_steps: int
    num_decode_steps: int
    beside_prefill: _duration_pb2.Duration
    losses: _containers.RepeatedCompositeFieldContainer[LifeLoss]
    num_losses: int
    parts: _containers.RepeatedCompositeFieldContainer[LifePart]
    intervals: _containers.RepeatedCompositeFieldContainer[LifeInterval]
    num_intervals: int
    num_drafted_tokens: int
    num_accepted_tokens: int
    def __init__(self, server_request_id: _Optional[str] = ..., request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., label: _Optional[str] = ..., level: _Optional[int] = ..., class_name: _Optional[str] = ..., phase: _Optional[str] = ..., end: _Optional[str] = ..., delivered: bool = ..., total: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., ttft: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., num_prompt_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., num_ahead: _Optional[int] = ..., num_seated: _Optional[int] = ..., seated: _Optional[_Iterable[_Union[Neighbour, _Mapping]]] = ..., num_holders: _Optional[int] = ..., holders: _Optional[_Iterable[_Union[Neighbour, _Mapping]]] = ..., num_prefill_steps: _Optional[int] = ..., num_decode_steps: _Optional[int] = ..., beside_prefill: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., losses: _Optional[_Iterable[_Union[LifeLoss, _Mapping]]] = ..., num_losses: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[LifePart, _Mapping]]] = ..., intervals: _Optional[_Iterable[_Union[LifeInterval, _Mapping]]] = ..., num_intervals: _Optional[int] = ..., num_drafted_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ...) -> None: ...
