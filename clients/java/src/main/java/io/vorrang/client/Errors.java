package io.vorrang.client;

import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.BadRequest;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import io.grpc.Status;
import io.grpc.protobuf.StatusProto;
import io.vorrang.client.VorrangException.FieldViolation;
import io.vorrang.v1.CommandRejectedEvent;
import io.vorrang.v1.FailedEvent;
import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Set;

/** Reads what the server says of an error. The reason decides; the gRPC code only where there is none. */
final class Errors {
  static final String DOMAIN = "vorrang";
  private static final Set<Status.Code> RETRYABLE =
      Set.of(Status.Code.UNAVAILABLE, Status.Code.RESOURCE_EXHAUSTED, Status.Code.ABORTED);

  /** What codes mean that come without a reason: from this client's own deadline, or from a proxy. */
  private static final Map<Status.Code, Reason> REASON_BY_CODE =
      Map.of(
          Status.Code.DEADLINE_EXCEEDED, Reason.DEADLINE_EXCEEDED,
          Status.Code.UNAUTHENTICATED, Reason.UNAUTHENTICATED,
          Status.Code.PERMISSION_DENIED, Reason.PERMISSION_DENIED,
          Status.Code.UNIMPLEMENTED, Reason.UNIMPLEMENTED);

  private Errors() {}

  /** The error with which a call ended. */
  static VorrangException ofCall(Throwable error) {
    var failure = read(StatusProto.fromThrowable(error), null, Optional.empty());
    if (failure.reason() == Reason.NONE) {
      failure = failure.because(REASON_BY_CODE.getOrDefault(failure.code(), Reason.NONE));
    }
    boolean transport = failure.reason() == Reason.NONE && failure.code() == Status.Code.UNAVAILABLE;
    return transport
        ? new ConnectionLostException(failure, error)
        : new VorrangException(failure, error);
  }

  /** The error with which a request of a session ended. */
  static VorrangException ofRequest(FailedEvent failed) {
    var usage = failed.hasUsage() ? Optional.of(Wire.usage(failed.getUsage())) : Optional.<Usage>empty();
    return new VorrangException(read(failed.getStatus(), failed.getRetryable(), usage), null);
  }

  /** Why a command was not obeyed. */
  static CommandRejectedException ofCommand(CommandRejectedEvent rejected) {
    return new CommandRejectedException(read(rejected.getStatus(), null, Optional.empty()), null);
  }

  /** A request that never was, because its start was not obeyed. */
  static VorrangException ofStart(CommandRejectedEvent rejected) {
    return new VorrangException(read(rejected.getStatus(), null, Optional.empty()), null);
  }

  private static VorrangException.Failure read(
      com.google.rpc.Status status, Boolean retryable, Optional<Usage> usage) {
    var code = Status.fromCodeValue(status.getCode()).getCode();
    var reason = Reason.NONE;
    Optional<Duration> retryAfter = Optional.empty();
    List<FieldViolation> violations = List.of();
    for (Any detail : status.getDetailsList()) {
      try {
        if (detail.is(ErrorInfo.class)) {
          var info = detail.unpack(ErrorInfo.class);
          reason = info.getDomain().equals(DOMAIN) ? reasonNamed(info.getReason()) : reason;
        } else if (detail.is(BadRequest.class)) {
          violations =
              detail.unpack(BadRequest.class).getFieldViolationsList().stream()
                  .map(v -> new FieldViolation(v.getField(), v.getDescription()))
                  .toList();
        } else if (detail.is(RetryInfo.class)) {
          retryAfter = Optional.of(Wire.duration(detail.unpack(RetryInfo.class).getRetryDelay()));
        }
      } catch (InvalidProtocolBufferException unreadable) {
        // A detail that can't be read must not hide the error it belongs to.
        continue;
      }
    }
    return new VorrangException.Failure(
        status.getMessage().isEmpty() ? code.name() : status.getMessage(),
        code,
        reason,
        retryable == null ? RETRYABLE.contains(code) : retryable,
        retryAfter,
        violations,
        usage);
  }

  private static Reason reasonNamed(String name) {
    return Wire.named(Reason.class, name, Reason.UNKNOWN);
  }
}
