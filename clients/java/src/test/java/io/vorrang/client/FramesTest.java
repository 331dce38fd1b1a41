package io.vorrang.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertInstanceOf;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.grpc.Status;
import io.grpc.stub.StreamObserver;
import io.vorrang.v1.AcceptedEvent;
import io.vorrang.v1.CommandRejectedEvent;
import io.vorrang.v1.DeltaEvent;
import io.vorrang.v1.FinishedEvent;
import io.vorrang.v1.GoAwayEvent;
import io.vorrang.v1.PriorityChangedEvent;
import io.vorrang.v1.SessionRequest;
import io.vorrang.v1.SessionResponse;
import java.time.Duration;
import java.util.List;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;

/** The frames a session sends, as a server sees them. */
@Timeout(180)
class FramesTest {
  private FakeServer server;
  private CuttingProxy proxy;
  private VorrangClient client;

  @BeforeEach
  void open() throws Exception {
    server = new FakeServer();
    server.answers = FramesTest::acceptAndSendFourTokens;
    proxy = new CuttingProxy(server.port());
    client = VorrangClient.builder().target(proxy.address()).build();
  }

  @AfterEach
  void close() throws Exception {
    client.close();
    proxy.close();
    server.close();
  }

  @Test
  void creditFramesGrantTheWindowAndSayWhatWasKept() throws Exception {
    try (Session session = client.openSession(closingAtOnce())) {
      var probe = Probe.on(session.start(Request.text("x").creditTokens(4).build()), 2);
      Probe.await("two events", () -> probe.events.size() == 2);
      assertEquals(4, server.frames.get(1).getStart().getSpec().getCreditTokens());
      assertEquals(2, server.frames.size(), "one token of four used up: no grant yet");
      probe.request(1);
      Probe.await("a grant", () -> server.frames.size() == 3);
      var credit = server.frames.get(2).getCredit();
      assertEquals(2, credit.getTokens());
      assertEquals(3, credit.getAcknowledgedSequence());
      probe.request(1);
      Probe.await("another event", () -> probe.events.size() == 4);
      session.start(Request.text("witness").build()); // sent after whatever was due
      Probe.await("the witness", () -> holdsStart("witness"));
      assertEquals(1, server.frames.stream().filter(SessionRequest::hasCredit).count());
    }
  }

  @Test
  void whatIsReadWhileTheConnectionIsLostIsNotGrantedTwice() throws Exception {
    try (Session session = client.openSession(closingAtOnce())) {
      var stream = session.start(Request.text("x").creditTokens(4).build());
      var probe = Probe.on(stream, 2); // accepted, and one token of four
      Probe.await("two events", () -> probe.events.size() == 2);
      var next = Probe.on(session.start(Request.text("y").build()), 1);
      Probe.await("what was sent before it", () -> next.events.size() == 1);
      proxy.refuse(true);
      proxy.cut();
      Probe.await("the loss", () -> !session.isConnected());
      probe.request(2); // three of four: the window would be filled up if the stream were there
      Probe.await("four events", () -> probe.events.size() == 4);
      server.frames.clear();
      proxy.refuse(false);
      Probe.await("a resume", () -> server.frames.stream().anyMatch(SessionRequest::hasResume));
      // The server counts the start's four tokens anew, and one is still unread: nothing is lacking.
      var resume = server.frames.get(1).getResume();
      assertEquals(5, resume.getAfterSequence());
      assertEquals("token", server.frames.get(0).getOpen().getResumeSessionToken());
      session.start(Request.text("witness").build()); // sent after whatever was due
      Probe.await("the witness", () -> server.frames.stream().anyMatch(SessionRequest::hasStart));
      assertEquals(List.of(), server.frames.stream().filter(SessionRequest::hasCredit).toList());
    }
  }

  @Test
  void eventsThatComeTwiceAreGivenOnce() throws Exception {
    server.answers =
        (frame, out) -> {
          acceptAndSendFourTokens(frame, out);
          if (frame.hasResume()) { // one event more than was asked for
            String id = frame.getResume().getRequestId();
            out.onNext(answer(id, 5).setDelta(DeltaEvent.newBuilder().addTokenIds(3)).build());
            out.onNext(answer(id, 6).setFinished(FinishedEvent.getDefaultInstance()).build());
          }
        };
    try (Session session = client.openSession(closingAtOnce())) {
      var probe = Probe.on(session.start(Request.text("x").build()), Long.MAX_VALUE);
      Probe.await("all tokens", () -> probe.tokens() == 4);
      proxy.cut();
      probe.finished();
      assertEquals(4, probe.tokens());
    }
  }

  @Test
  void aServerThatSaidItGoesAwayIsNotLookedForAgain() throws Exception {
    server.answers =
        (frame, out) -> {
          var goAway = GoAwayEvent.getDefaultInstance();
          out.onNext(SessionResponse.newBuilder().setGoAway(goAway).build());
        };
    try (Session session = client.openSession(closingAtOnce())) {
      var stream = session.start(Request.text("x").build());
      assertEquals(Duration.ZERO, session.goingAway().get(60, TimeUnit.SECONDS));
      proxy.cut();
      assertThrows(ConnectionLostException.class, stream::result);
      assertFalse(session.isOpen());
      assertEquals(1, server.frames.stream().filter(SessionRequest::hasOpen).count());
    }
  }

  @Test
  void aChangeOfPriorityThatIsNeverAnsweredEndsWithItsRequest() throws Exception {
    server.answers =
        (frame, out) -> {
          acceptAndSendFourTokens(frame, out);
          if (frame.hasReprioritize()) {
            String id = frame.getReprioritize().getRequestId();
            out.onNext(answer(id, 6).setFinished(FinishedEvent.getDefaultInstance()).build());
          }
        };
    try (Session session = client.openSession(closingAtOnce())) {
      var answer = session.start(Request.text("x").build()).reprioritize(Priority.BATCH);
      var failure = assertThrows(ExecutionException.class, () -> answer.get(5, TimeUnit.SECONDS));
      assertEquals(Reason.UNKNOWN_REQUEST, ((VorrangException) failure.getCause()).reason());
    }
  }

  @Test
  void aChangeOfPriorityOutlivesALossAndTakesNoAnswerThatIsAnothers() throws Exception {
    server.answers =
        (frame, out) -> {
          acceptAndSendFourTokens(frame, out);
          if (frame.hasResume()) { // it had obeyed the first change
            out.onNext(changed(frame.getResume().getRequestId(), 6, 3));
          } else if (frame.getReprioritize().getPriority().getLevel() == 4) {
            String id = frame.getReprioritize().getRequestId();
            out.onNext(changed(id, 7, 3)); // the answer to the first one, said again
            out.onNext(changed(id, 8, 4));
          }
        };
    try (Session session = client.openSession(closingAtOnce())) {
      var stream = session.start(Request.text("x").build());
      var probe = Probe.on(stream, Long.MAX_VALUE);
      Probe.await("all tokens", () -> probe.tokens() == 4);
      var first = stream.reprioritize(Priority.level(3));
      Probe.await("the change", () -> server.frames.stream().anyMatch(SessionRequest::hasReprioritize));
      proxy.cut();
      assertEquals(3, first.get(60, TimeUnit.SECONDS).level());
      assertEquals(4, stream.reprioritize(Priority.level(4)).get(60, TimeUnit.SECONDS).level());
    }
  }

  @ParameterizedTest
  @ValueSource(booleans = {true, false})
  void aRepeatedChangeThatComesTooLateIsAnsweredByWhatBecameOfTheFirst(boolean wasObeyed)
      throws Exception {
    var changes = new AtomicInteger();
    server.answers =
        (frame, out) -> {
          acceptAndSendFourTokens(frame, out);
          if (frame.hasReprioritize() && changes.incrementAndGet() == 2) {
            String id = frame.getReprioritize().getRequestId();
            out.onNext(tooLate(id));
            if (wasObeyed) {
              out.onNext(changed(id, 6, 5));
            }
            long sequence = wasObeyed ? 7 : 6;
            out.onNext(answer(id, sequence).setFinished(FinishedEvent.getDefaultInstance()).build());
          }
        };
    try (Session session = client.openSession(closingAtOnce())) {
      var stream = session.start(Request.text("x").build());
      var probe = Probe.on(stream, Long.MAX_VALUE);
      Probe.await("all tokens", () -> probe.tokens() == 4);
      var change = stream.reprioritize(Priority.level(5));
      Probe.await("the change", () -> changes.get() == 1);
      proxy.cut();
      if (wasObeyed) {
        assertEquals(5, change.get(60, TimeUnit.SECONDS).level());
      } else {
        var failure = assertThrows(ExecutionException.class, () -> change.get(60, TimeUnit.SECONDS));
        assertEquals(Reason.UNKNOWN_REQUEST, ((VorrangException) failure.getCause()).reason());
      }
      probe.finished();
    }
  }

  @Test
  void aChangeThatNobodyWaitsForIsNotSaidAgain() throws Exception {
    server.answers =
        (frame, out) -> {
          acceptAndSendFourTokens(frame, out);
          if (frame.getReprioritize().getPriority().getLevel() == 4) {
            out.onNext(changed(frame.getReprioritize().getRequestId(), 6, 4));
          }
        };
    try (Session session = client.openSession(closingAtOnce())) {
      var stream = session.start(Request.text("x").build());
      var probe = Probe.on(stream, Long.MAX_VALUE);
      Probe.await("all tokens", () -> probe.tokens() == 4);
      var given = stream.reprioritize(Priority.level(3));
      Probe.await("the change", () -> server.frames.stream().anyMatch(SessionRequest::hasReprioritize));
      given.cancel(false);
      proxy.cut();
      assertEquals(4, stream.reprioritize(Priority.level(4)).get(60, TimeUnit.SECONDS).level());
      assertEquals(2, server.frames.stream().filter(SessionRequest::hasReprioritize).count());
    }
  }

  @Test
  void aChangeThatIsLostForGoodFailsWithItsSession() throws Exception {
    var options = SessionOptions.builder().reconnectTimeout(Duration.ofMillis(300)).build();
    Session session = client.openSession(options);
    var stream = session.start(Request.text("x").build());
    var answered = stream.reprioritize(Priority.level(3));
    Probe.await("the change", () -> server.frames.stream().anyMatch(SessionRequest::hasReprioritize));
    proxy.refuse(true);
    proxy.cut();
    Probe.await("the loss", () -> !session.isConnected());
    var asked = stream.reprioritize(Priority.level(4)); // while it is looked for
    for (var change : List.of(answered, asked)) {
      var failure = assertThrows(ExecutionException.class, () -> change.get(60, TimeUnit.SECONDS));
      assertInstanceOf(ConnectionLostException.class, failure.getCause());
    }
    session.close();
  }

  private static SessionResponse tooLate(String requestId) {
    var rejected =
        CommandRejectedEvent.newBuilder()
            .setCommand("reprioritize")
            .setStatus(FakeServer.status(Status.Code.NOT_FOUND, "UNKNOWN_REQUEST"));
    return SessionResponse.newBuilder()
        .setRequestId(requestId)
        .setCommandRejected(rejected)
        .build();
  }

  private static SessionResponse changed(String requestId, long sequence, int level) {
    var event = PriorityChangedEvent.newBuilder().setLevel(level);
    return answer(requestId, sequence).setPriorityChanged(event).build();
  }

  @Test
  void aStartThatWasNeverAnsweredIsRepeatedAndPausesAndCancelsAreSaidAgain() throws Exception {
    server.answers = (frame, out) -> {};
    try (Session session = client.openSession(closingAtOnce())) {
      var stream = session.start(Request.text("x").id("a").build());
      stream.pause();
      stream.unpause();
      stream.cancel();
      Probe.await("four commands", () -> server.frames.size() == 5);
      var start = server.frames.get(1);
      server.frames.clear();
      proxy.cut();
      Probe.await("them again", () -> server.frames.size() == 4);
      assertEquals(start, server.frames.get(1));
      assertTrue(server.frames.get(2).hasUnpause());
      assertEquals("a", server.frames.get(3).getCancel().getRequestId());
    }
  }

  @Test
  void closingCancelsByNameSoThatTheServerKeepsNothing() throws Exception {
    Session session = client.openSession(); // closing waits for the server, which has read all by then
    session.start(Request.text("x").id("a").build());
    session.start(Request.text("x").id("b").build());
    session.close();
    assertEquals(2, server.frames.stream().filter(SessionRequest::hasCancel).count());
  }

  @Test
  void startsWaitWhileTheServerTakesNothingAndOthersDoNot() throws Exception {
    var reads = new CountDownLatch(1);
    server.answers =
        (frame, out) -> {
          try {
            if (frame.getStart().getSpec().getLabel().equals("large")) {
              reads.await();
            }
          } catch (InterruptedException interruption) {
            Thread.currentThread().interrupt();
          }
        };
    Request large = Request.text("x".repeat(256 * 1024)).label("large").build();
    int wanted = 100; // 25 MiB
    var started = new AtomicInteger();
    try (Session session = client.openSession(closingAtOnce());
        VorrangClient other = VorrangClient.builder().target(proxy.address()).build()) {
      var thread =
          new Thread(
              () -> {
                while (started.get() < wanted) {
                  session.start(large);
                  started.incrementAndGet();
                }
              });
      thread.start();
      Probe.await("a start that waits", () -> thread.getState() == Thread.State.WAITING);
      assertTrue(started.get() < 60, started + " of " + wanted + " were buffered");
      try (Session another = other.openSession(closingAtOnce())) {
        another.start(Request.text("small").build());
        Probe.await("another session's start", () -> holdsStart("small"));
      }
      reads.countDown();
      thread.join(20_000);
      assertEquals(wanted, started.get());
    }
  }

  private boolean holdsStart(String prompt) {
    return server.frames.stream()
        .anyMatch(frame -> frame.getStart().getSpec().getPrompt().getText().equals(prompt));
  }

  @Test
  void closingAClientWaitsForAllItsSessionsAtOnce() throws Exception {
    server.numEndedTogether = 30; // one after the other they would wait for one another
    var options = SessionOptions.builder().closeTimeout(Duration.ofMinutes(1)).build();
    for (int i = 0; i < 30; i++) {
      client.openSession(options).start(Request.text("x").build());
    }
    client.close();
    assertTrue(client.transport().channel().isTerminated());
  }

  /** This server never ends a request, so there is no use in waiting for it. */
  private static SessionOptions closingAtOnce() {
    return SessionOptions.builder().closeTimeout(Duration.ofMillis(50)).build();
  }

  private static void acceptAndSendFourTokens(
      SessionRequest frame, StreamObserver<SessionResponse> out) {
    if (frame.hasStart()) {
      String id = frame.getStart().getRequestId();
      out.onNext(answer(id, 1).setAccepted(AcceptedEvent.getDefaultInstance()).build());
      for (int i = 0; i < 4; i++) {
        out.onNext(answer(id, 2 + i).setDelta(DeltaEvent.newBuilder().addTokenIds(i)).build());
      }
    }
  }

  private static SessionResponse.Builder answer(String requestId, long sequence) {
    return SessionResponse.newBuilder().setRequestId(requestId).setSequence(sequence);
  }
}
