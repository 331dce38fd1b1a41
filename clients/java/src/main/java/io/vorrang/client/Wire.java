package io.vorrang.client;

import com.google.protobuf.ProtocolMessageEnum;
import io.vorrang.v1.AcceptedEvent;
import io.vorrang.v1.DeltaEvent;
import io.vorrang.v1.FinishedEvent;
import io.vorrang.v1.GenerateOutput;
import io.vorrang.v1.GenerateResponse;
import io.vorrang.v1.GenerateStreamResponse;
import io.vorrang.v1.PriorityChangedEvent;
import io.vorrang.v1.PromptLogprobsEvent;
import io.vorrang.v1.SessionResponse;
import java.time.Duration;
import java.util.Arrays;
import java.util.List;
import java.util.Optional;
import java.util.OptionalInt;

/** From the wire's messages to this package's values, and back where both have a form of their own. */
final class Wire {
  private Wire() {}

  static Duration duration(com.google.protobuf.Duration duration) {
    return Duration.ofSeconds(duration.getSeconds(), duration.getNanos());
  }

  static com.google.protobuf.Duration duration(Duration duration) {
    return com.google.protobuf.Duration.newBuilder()
        .setSeconds(duration.getSeconds())
        .setNanos(duration.getNano())
        .build();
  }

  static Usage usage(io.vorrang.v1.Usage usage) {
    return new Usage(
        usage.getPromptTokens(),
        usage.getCachedTokens(),
        usage.getOutputTokens(),
        usage.getRecomputedTokens(),
        usage.getPreemptions(),
        duration(usage.getQueued()),
        duration(usage.getPrefill()),
        duration(usage.getDecode()),
        duration(usage.getPreempted()),
        duration(usage.getParked()));
  }

  /** The event of a request; empty for other frames and for what this version does not know. */
  static Optional<Event> event(SessionResponse frame) {
    return Optional.ofNullable(
        switch (frame.getEventCase()) {
          case ACCEPTED -> accepted(frame.getAccepted());
          case QUEUE_UPDATE -> new Event.QueueUpdate(frame.getQueueUpdate().getQueuePosition());
          case STARTED -> started(frame.getStarted(), frame.getOutputIndex());
          case PROMPT_LOGPROBS -> promptLogprobs(frame.getPromptLogprobs());
          case DELTA -> delta(frame.getDelta(), frame.getOutputIndex());
          case PREEMPTED -> preempted(frame.getPreempted(), frame.getOutputIndex());
          case RESUMED -> resumed(frame.getResumed(), frame.getOutputIndex());
          case PRIORITY_CHANGED -> priorityChanged(frame.getPriorityChanged());
          case OUTPUT_FINISHED ->
              new Event.OutputFinished(
                  frame.getOutputIndex(), finished(frame.getOutputFinished()));
          case FINISHED -> finished(frame.getFinished());
          default -> null;
        });
  }

  /** The event of a call; empty for what this version does not know. */
  static Optional<Event> event(GenerateStreamResponse frame) {
    return Optional.ofNullable(
        switch (frame.getEventCase()) {
          case ACCEPTED -> accepted(frame.getAccepted());
          case QUEUE_UPDATE -> new Event.QueueUpdate(frame.getQueueUpdate().getQueuePosition());
          case STARTED -> started(frame.getStarted(), frame.getOutputIndex());
          case PROMPT_LOGPROBS -> promptLogprobs(frame.getPromptLogprobs());
          case DELTA -> delta(frame.getDelta(), frame.getOutputIndex());
          case PREEMPTED -> preempted(frame.getPreempted(), frame.getOutputIndex());
          case RESUMED -> resumed(frame.getResumed(), frame.getOutputIndex());
          case PRIORITY_CHANGED -> priorityChanged(frame.getPriorityChanged());
          case OUTPUT_FINISHED ->
              new Event.OutputFinished(
                  frame.getOutputIndex(), finished(frame.getOutputFinished()));
          case FINISHED -> finished(frame.getFinished());
          default -> null;
        });
  }

  static Event.Accepted accepted(AcceptedEvent event) {
    return new Event.Accepted(
        event.getLevel(),
        event.getCapped(),
        event.getRequestedLevel(),
        event.getQueuePosition(),
        event.getPriorityIgnored(),
        event.getPromptTokens(),
        event.getSeed());
  }

  static Event.PriorityChanged priorityChanged(PriorityChangedEvent event) {
    return new Event.PriorityChanged(
        event.getLevel(), event.getCapped(), event.getPriorityIgnored());
  }

  static Event.Finished finished(FinishedEvent event) {
    var reason = suffix(event.getReason(), "FINISH_REASON_", event.getReasonValue());
    return new Event.Finished(
        named(FinishReason.class, reason, FinishReason.UNKNOWN),
        usage(event.getUsage()),
        event.getStopString(),
        event.hasStopTokenId() ? OptionalInt.of(event.getStopTokenId()) : OptionalInt.empty());
  }

  /** The constant of that name, or {@code otherwise}: a newer server may know more of them. */
  static <E extends Enum<E>> E named(Class<E> type, String name, E otherwise) {
    return Arrays.stream(type.getEnumConstants())
        .filter(constant -> constant.name().equals(name))
        .findFirst()
        .orElse(otherwise);
  }

  /** The outcome of a call; an only output is not repeated among the outputs there. */
  static Result result(GenerateResponse response) {
    var finished = finished(response.getFinished());
    var outputs = response.getOutputsList().stream().map(Wire::output).toList();
    if (outputs.isEmpty()) {
      var tokenIds = List.copyOf(response.getTokenIdsList());
      var logprobs = logprobs(response.getLogprobsList());
      outputs = List.of(new Output(response.getText(), tokenIds, logprobs, finished));
    }
    var promptLogprobs = logprobs(response.getPromptLogprobsList());
    return new Result(outputs, promptLogprobs, accepted(response.getAccepted()), finished);
  }

  private static Output output(GenerateOutput output) {
    return new Output(
        output.getText(),
        List.copyOf(output.getTokenIdsList()),
        logprobs(output.getLogprobsList()),
        finished(output.getFinished()));
  }

  private static Event.Started started(io.vorrang.v1.StartedEvent event, int outputIndex) {
    return new Event.Started(event.getPromptTokens(), event.getCachedTokens(), outputIndex);
  }

  private static Event.PromptLogprobs promptLogprobs(PromptLogprobsEvent event) {
    return new Event.PromptLogprobs(
        event.getFirstTokenIndex(), logprobs(event.getPositionsList()));
  }

  private static Event.Delta delta(DeltaEvent event, int outputIndex) {
    return new Event.Delta(
        event.getText(),
        List.copyOf(event.getTokenIdsList()),
        event.getFirstTokenIndex(),
        logprobs(event.getLogprobsList()),
        outputIndex);
  }

  private static Event.Preempted preempted(io.vorrang.v1.PreemptedEvent event, int outputIndex) {
    var reason = suffix(event.getReason(), "PREEMPT_REASON_", event.getReasonValue());
    return new Event.Preempted(
        named(PreemptReason.class, reason, PreemptReason.UNKNOWN), event.getCount(), outputIndex);
  }

  private static Event.Resumed resumed(io.vorrang.v1.ResumedEvent event, int outputIndex) {
    return new Event.Resumed(event.getRecomputedTokens(), outputIndex);
  }

  private static List<Event.PositionLogprobs> logprobs(
      List<io.vorrang.v1.PositionLogprobs> positions) {
    return positions.stream().map(Wire::logprobs).toList();
  }

  private static Event.PositionLogprobs logprobs(io.vorrang.v1.PositionLogprobs position) {
    return new Event.PositionLogprobs(
        logprob(position.getSampled()), position.getTopList().stream().map(Wire::logprob).toList());
  }

  private static Event.TokenLogprob logprob(io.vorrang.v1.TokenLogprob token) {
    return new Event.TokenLogprob(token.getTokenId(), token.getLogprob());
  }

  private static String suffix(ProtocolMessageEnum value, String prefix, int number) {
    String name = value.toString();
    return name.startsWith(prefix) ? name.substring(prefix.length()) : Integer.toString(number);
  }
}
