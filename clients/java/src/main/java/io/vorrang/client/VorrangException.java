package io.vorrang.client;

import io.grpc.Status;
import java.time.Duration;
import java.util.List;
import java.util.Optional;

/**
 * Everything this client throws but for misuse. {@link #reason} says what happened in a form that
 * programs can act on.
 */
public class VorrangException extends RuntimeException {
  private final transient Failure failure;

  /**
   * One field of a request that broke a rule.
   *
   * @param field path of the field, such as {@code sampling.temperature}
   * @param description the rule, and what was given
   */
  public record FieldViolation(String field, String description) {}

  /** What an error says of itself. */
  record Failure(
      String message,
      Status.Code code,
      Reason reason,
      boolean retryable,
      Optional<Duration> retryAfter,
      List<FieldViolation> violations,
      Optional<Usage> usage) {
    Failure because(Reason reason) {
      return new Failure(message, code, reason, retryable, retryAfter, violations, usage);
    }

    static Failure of(String message, Status.Code code, Reason reason, boolean retryable) {
      return new Failure(
          message, code, reason, retryable, Optional.empty(), List.of(), Optional.empty());
    }
  }

  VorrangException(Failure failure, Throwable cause) {
    super(
        "%s (%s)".formatted(failure.message, failure.reason == Reason.NONE ? failure.code : failure.reason),
        cause);
    this.failure = failure;
  }

  /** What happened. */
  public Reason reason() {
    return failure.reason;
  }

  /** The gRPC status code it came with, or the one that fits it. */
  public Status.Code code() {
    return failure.code;
  }

  /** Whether the same request may succeed later. */
  public boolean retryable() {
    return failure.retryable;
  }

  /** How long the server asks to wait before trying again, if it said so. */
  public Optional<Duration> retryAfter() {
    return failure.retryAfter;
  }

  /** The fields that broke a rule. */
  public List<FieldViolation> violations() {
    return failure.violations;
  }

  /** What the request has cost so far, if that is known. */
  public Optional<Usage> usage() {
    return failure.usage;
  }

  final Failure failure() {
    return failure;
  }

  /** An equal error with the stack of the thread that is about to throw it. */
  VorrangException again() {
    return new VorrangException(failure, this);
  }

  static VorrangException interrupted() {
    Thread.currentThread().interrupt();
    return new VorrangException(
        Failure.of("the waiting thread was interrupted", Status.Code.CANCELLED, Reason.NONE, true), null);
  }

  static VorrangException cancelled(Throwable cause) {
    return new VorrangException(
        Failure.of("the request was cancelled", Status.Code.CANCELLED, Reason.CANCELLED, false), cause);
  }

  static VorrangException sessionState(String message) {
    return new VorrangException(
        Failure.of(message, Status.Code.FAILED_PRECONDITION, Reason.SESSION_STATE, false), null);
  }
}
