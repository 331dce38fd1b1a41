package io.vorrang.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertInstanceOf;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.google.protobuf.Any;
import com.google.protobuf.ByteString;
import com.google.protobuf.UnknownFieldSet;
import io.grpc.Status;
import io.vorrang.v1.AcceptedEvent;
import io.vorrang.v1.CommandRejectedEvent;
import io.vorrang.v1.DeltaEvent;
import io.vorrang.v1.ErrorReason;
import io.vorrang.v1.FailedEvent;
import io.vorrang.v1.FinishedEvent;
import io.vorrang.v1.SessionResponse;
import io.vorrang.v1.Usage;
import java.time.Duration;
import java.util.Arrays;
import java.util.EnumSet;
import java.util.List;
import java.util.Optional;
import java.util.Set;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import java.util.stream.Collectors;
import java.util.stream.Stream;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.MethodSource;

/** Every reason of an error, in every place it can come from, as it goes over the wire. */
@Timeout(180)
class ErrorTableTest {
  private FakeServer server;
  private VorrangClient client;

  @BeforeEach
  void open() throws Exception {
    server = new FakeServer();
    client = VorrangClient.builder().target(server.address()).build();
  }

  @AfterEach
  void close() {
    client.close();
    server.close();
  }

  static Stream<Reason> reasons() {
    return EnumSet.complementOf(EnumSet.of(Reason.NONE, Reason.UNKNOWN)).stream();
  }

  @Test
  void reasonsAreThoseOfTheProtocol() {
    assertEquals(
        names(ErrorReason.values(), "ERROR_REASON_"),
        reasons().map(Enum::name).collect(Collectors.toSet()));
    assertEquals(
        names(io.vorrang.v1.FinishReason.values(), "FINISH_REASON_"),
        names(FinishReason.values(), ""));
    assertEquals(
        names(io.vorrang.v1.PreemptReason.values(), "PREEMPT_REASON_"),
        names(PreemptReason.values(), ""));
  }

  @ParameterizedTest
  @MethodSource("reasons")
  void aCallsErrorHasReasonCodeAndDetails(Reason reason) {
    var violation = FakeServer.violation("spec.field", "must be");
    server.refusal =
        FakeServer.status(
            Status.Code.RESOURCE_EXHAUSTED, reason.name(), violation, FakeServer.retry(250));
    var request = Request.text("x").build();
    var error = assertThrows(VorrangException.class, () -> client.generate(request));
    assertEquals(reason, error.reason());
    assertEquals(Status.Code.RESOURCE_EXHAUSTED, error.code());
    assertTrue(error.retryable());
    assertEquals(Optional.of(Duration.ofMillis(250)), error.retryAfter());
    assertEquals(
        List.of(new VorrangException.FieldViolation("spec.field", "must be")), error.violations());
    assertTrue(error.getMessage().contains("told by a test"));
  }

  @ParameterizedTest
  @MethodSource("reasons")
  void aRequestsFailureHasWhatTheServerSaidOfIt(Reason reason) {
    server.answers =
        (frame, out) -> {
          if (frame.hasStart()) {
            var failed =
                FailedEvent.newBuilder()
                    .setStatus(FakeServer.status(Status.Code.ABORTED, reason.name()))
                    .setRetryable(false)
                    .setUsage(Usage.newBuilder().setOutputTokens(3));
            out.onNext(answer(frame.getStart().getRequestId(), 1).setFailed(failed).build());
          }
        };
    try (Session session = client.openSession()) {
      var stream = session.start(Request.text("x").build());
      var error = assertThrows(VorrangException.class, stream::result);
      assertEquals(reason, error.reason());
      assertFalse(error.retryable(), "the server's word counts more than the code");
      assertEquals(3, error.usage().orElseThrow().outputTokens());
      assertEquals(Optional.empty(), error.retryAfter());
    }
  }

  @ParameterizedTest
  @MethodSource("reasons")
  void aRejectedCommandLeavesItsRequestAlone(Reason reason) {
    server.answers =
        (frame, out) -> {
          if (frame.hasStart()) {
            String id = frame.getStart().getRequestId();
            out.onNext(answer(id, 1).setAccepted(AcceptedEvent.getDefaultInstance()).build());
          } else if (frame.hasReprioritize()) {
            String id = frame.getReprioritize().getRequestId();
            var rejected =
                CommandRejectedEvent.newBuilder()
                    .setCommand("reprioritize")
                    .setStatus(FakeServer.status(Status.Code.NOT_FOUND, reason.name()));
            out.onNext(answer(id, 0).setCommandRejected(rejected).build());
            out.onNext(answer(id, 2).setFinished(FinishedEvent.getDefaultInstance()).build());
          }
        };
    try (Session session = client.openSession()) {
      var stream = session.start(Request.text("x").build());
      var answer = stream.reprioritize(Priority.BATCH);
      var failure = assertThrows(ExecutionException.class, () -> answer.get(5, TimeUnit.SECONDS));
      assertEquals(
          reason, assertInstanceOf(CommandRejectedException.class, failure.getCause()).reason());
      assertEquals(FinishReason.UNKNOWN, stream.result().finishReason());
    }
  }

  @Test
  void whatANewerServerAddsBreaksNothing() {
    server.answers =
        (frame, out) -> {
          if (frame.hasStart()) {
            String id = frame.getStart().getRequestId();
            var unknown =
                UnknownFieldSet.newBuilder()
                    .addField(
                        99, UnknownFieldSet.Field.newBuilder().addLengthDelimited(ByteString.EMPTY).build());
            out.onNext(answer(id, 1).setAccepted(AcceptedEvent.getDefaultInstance()).build());
            out.onNext(answer(id, 2).setUnknownFields(unknown.build()).build());
            out.onNext(answer(id, 3).setDelta(DeltaEvent.newBuilder().setText("x")).build());
            out.onNext(answer(id, 4).setFinished(FinishedEvent.newBuilder().setReasonValue(77)).build());
          }
        };
    try (Session session = client.openSession()) {
      Result result = session.start(Request.text("x").build()).result();
      assertEquals("x", result.text());
      assertEquals(FinishReason.UNKNOWN, result.finishReason());
    }
    server.refusal = FakeServer.status(Status.Code.ABORTED, "A_NEW_REASON");
    var request = Request.text("x").build();
    var error = assertThrows(VorrangException.class, () -> client.generate(request));
    assertEquals(Reason.UNKNOWN, error.reason());
  }

  @Test
  void aDetailThatCanNotBeReadHidesNothing() {
    var broken =
        Any.newBuilder()
            .setTypeUrl("type.googleapis.com/google.rpc.BadRequest")
            .setValue(ByteString.copyFromUtf8("\u0007nonsense"))
            .build();
    server.refusal =
        FakeServer.status(Status.Code.INTERNAL, "INTERNAL").toBuilder().addDetails(broken).build();
    var request = Request.text("x").build();
    var error = assertThrows(VorrangException.class, () -> client.generate(request));
    assertEquals(Reason.INTERNAL, error.reason());
    assertEquals(List.of(), error.violations());
  }

  @Test
  void aRefusalByAProxyHasTheReasonOfItsCode() {
    server.refusal =
        com.google.rpc.Status.newBuilder().setCode(Status.Code.UNAUTHENTICATED.value()).build();
    var request = Request.text("x").build();
    var error = assertThrows(VorrangException.class, () -> client.generate(request));
    assertEquals(Reason.UNAUTHENTICATED, error.reason());
    assertFalse(error.retryable());
  }

  @Test
  void aReasonOfAnotherDomainIsNotOurs() {
    var foreign =
        com.google.rpc.ErrorInfo.newBuilder().setDomain("proxy").setReason("QUEUE_FULL").build();
    server.refusal =
        com.google.rpc.Status.newBuilder()
            .setCode(Status.Code.ABORTED.value())
            .addDetails(Any.pack(foreign))
            .build();
    var request = Request.text("x").build();
    var error = assertThrows(VorrangException.class, () -> client.generate(request));
    assertEquals(Reason.NONE, error.reason());
  }

  @Test
  void aCapOfThePriorityIsVisible() {
    server.answers =
        (frame, out) -> {
          if (frame.hasStart()) {
            String id = frame.getStart().getRequestId();
            var accepted =
                AcceptedEvent.newBuilder().setLevel(0).setCapped(true).setRequestedLevel(-10);
            out.onNext(answer(id, 1).setAccepted(accepted).build());
            out.onNext(answer(id, 2).setFinished(FinishedEvent.getDefaultInstance()).build());
          }
        };
    try (Session session = client.openSession()) {
      var request = Request.text("x").priority(Priority.INTERACTIVE).build();
      var accepted = session.start(request).result().accepted();
      assertTrue(accepted.capped());
      assertEquals(0, accepted.level());
      assertEquals(-10, accepted.requestedLevel());
    }
  }

  private static SessionResponse.Builder answer(String requestId, long sequence) {
    return SessionResponse.newBuilder().setRequestId(requestId).setSequence(sequence);
  }

  private static Set<String> names(Enum<?>[] values, String prefix) {
    return Arrays.stream(values)
        .map(value -> value.name().substring(value.name().startsWith(prefix) ? prefix.length() : 0))
        .filter(name -> !Set.of("UNSPECIFIED", "UNRECOGNIZED", "UNKNOWN").contains(name))
        .collect(Collectors.toSet());
  }
}
