"""A span per request by OpenTelemetry, when the settings name where it goes.

The span is the request, not the stream: it begins in the queue and holds starts,
preemptions and resumes as events. OpenTelemetry is an optional extra and is
imported here alone.
"""

import time
from collections.abc import Iterable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from engine.events import Failed, Finished, LevelChanged, Preempted, Resumed, Started
from engine.request import RequestId, RequestSpec
from engine.scheduler.plan import Plan
from server.sections import TracingSection
from server.settings import SettingsError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

TRACEPARENT_KEY = "traceparent"
#: The caller's own span, as its metadata names it; set by the guard.
TRACEPARENT: ContextVar[str] = ContextVar("traceparent", default="")


class RequestSpans:
    """Makes spans; an ``EngineObserver``.

    Args:
        section: where they go.
        exporter: what takes them instead (tests).

    Raises:
        SettingsError: OpenTelemetry is not installed.
    """

    def __init__(self, section: TracingSection, exporter: "SpanExporter | None" = None) -> None:
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            if exporter is None:
                from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

                exporter = OTLPSpanExporter(endpoint=section.otlp_endpoint)
        except ImportError as error:
            rule = f"needs OpenTelemetry ({error.name} is missing); install vorrang[otel]"
            raise SettingsError(f"tracing.otlp_endpoint: {rule}") from None
        self._provider = TracerProvider(
            sampler=ParentBasedTraceIdRatio(section.sample_share),
            resource=Resource.create({"service.name": "vorrang"}),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("vorrang")
        self._propagator = TraceContextTextMapPropagator()
        self._spans: dict[RequestId, Any] = {}

    def close(self) -> None:
        """Send what waits; takes as long as the collector does, so not on the event loop."""
        self._provider.shutdown()

    def submitted(self, spec: RequestSpec) -> None:
        """Begin a span, under the caller's own if it named one."""
        parent = self._propagator.extract({TRACEPARENT_KEY: TRACEPARENT.get()})
        attributes: dict[str, str | int] = {
            "vorrang.request_id": spec.request_id,
            "vorrang.tenant": spec.tenant,
            "vorrang.level": spec.level,
            "vorrang.label": spec.label,
            "vorrang.prompt_tokens": len(spec.prompt_token_ids),
        }
        self._spans[spec.request_id] = self._tracer.start_span(
            "vorrang.request", context=parent, attributes=attributes, start_time=time.time_ns()
        )

    def step_made(self, plan: Plan, duration_s: float) -> None:
        """Steps belong to no request."""

    def produced(self, spec: RequestSpec, num_tokens: int, gap_s: float | None) -> None:
        """Note the first token alone."""
        if gap_s is None:
            self._spans[spec.request_id].add_event("first_token")

    def happened(self, spec: RequestSpec, event: Started | Preempted | Resumed | LevelChanged) -> None:
        """Note it."""
        span = self._spans[spec.request_id]
        match event:
            case Started():
                span.add_event("started", {"cached_tokens": event.num_cached_tokens})
            case Preempted():
                span.add_event("preempted", {"reason": event.reason.value, "count": event.count})
            case Resumed():
                span.add_event("resumed", {"recomputed_tokens": event.num_recomputed_tokens})
            case LevelChanged():
                span.add_event("priority_changed", {"level": event.level})

    def ended(
        self, spec: RequestSpec, event: Finished | Failed, ttft_s: float | None, total_s: float
    ) -> None:
        """End the span."""
        from opentelemetry.trace import Status, StatusCode

        span = self._spans.pop(spec.request_id)
        usage = event.usage
        span.set_attributes(
            {
                "vorrang.output_tokens": usage.output_tokens,
                "vorrang.cached_tokens": usage.cached_tokens,
                "vorrang.recomputed_tokens": usage.recomputed_tokens,
                "vorrang.preemptions": usage.preemptions,
                "vorrang.queued_s": usage.queued_s,
            }
        )
        if isinstance(event, Finished):
            span.set_attribute("vorrang.finish_reason", event.reason.value)
        else:
            span.set_status(Status(StatusCode.ERROR, type(event.error).__name__))
        span.end()


def traceparent_of(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """The caller's span; empty when it names none or several."""
    values = [value for key, value in metadata if key == TRACEPARENT_KEY]
    return values[0] if len(values) == 1 and isinstance(values[0], str) else ""
