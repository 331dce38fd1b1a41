package io.vorrang.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertInstanceOf;
import static org.junit.jupiter.api.Assertions.assertNotEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.time.Duration;
import java.util.ArrayList;
import java.util.Iterator;
import java.util.Map;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.api.extension.ExtendWith;

/** What becomes of requests when connections break, against the real server behind a proxy that cuts them. */
@ExtendWith(SharedServer.class)
@Timeout(180)
class ResumeTest {
  private CuttingProxy proxy;
  private VorrangClient client;

  @BeforeEach
  void open() throws Exception {
    proxy = new CuttingProxy(SharedServer.port());
    client = VorrangClient.builder().target(proxy.address()).build();
  }

  @AfterEach
  void close() throws Exception {
    client.close();
    proxy.close();
  }

  @Test
  void aReaderSeesNothingOfALostConnection() throws Exception {
    try (Session session = client.openSession()) {
      String token = session.info().token();
      GenerationStream stream = session.start(Scripted.request("lost", 1000).creditTokens(64).build());
      var text = new StringBuilder();
      int cuts = 0;
      for (Event event : stream) {
        if (event instanceof Event.Delta delta) {
          assertEquals(text.length(), delta.firstTokenIndex(), "a gap or a repetition");
          text.append(delta.text());
          if (text.length() > 250 * (cuts + 1) && cuts < 3) {
            cuts++;
            proxy.cut();
          }
        }
      }
      assertEquals(3, cuts);
      assertEquals(Scripted.continuation("lost", 1000), text.toString());
      assertEquals(token, session.info().token());
    }
  }

  @Test
  void manyRequestsSurviveTheSameCut() throws Exception {
    try (Session session = client.openSession()) {
      var probes = new ArrayList<Probe>();
      for (int i = 0; i < 30; i++) {
        probes.add(Probe.on(session.start(Scripted.request("many " + i, 200).build()), Long.MAX_VALUE));
      }
      Probe.await("some tokens", () -> probes.get(0).tokens() > 10);
      proxy.cut();
      for (int i = 0; i < 30; i++) {
        probes.get(i).finished();
        assertEquals(Scripted.continuation("many " + i, 200), probes.get(i).text());
      }
    }
  }

  @Test
  void aStalledReadersCreditSurvivesACut() throws Exception {
    try (Session session = client.openSession()) {
      var request = Scripted.request("stalled", 100).creditTokens(6).build();
      var probe = Probe.on(session.start(request), 3);
      Probe.await("three events", () -> probe.events.size() == 3);
      proxy.cut();
      session.start(Scripted.request("witness", 30).build()).text();
      assertEquals(3, probe.events.size());
      probe.request(Long.MAX_VALUE);
      probe.finished();
      assertEquals(Scripted.continuation("stalled", 100), probe.text());
    }
  }

  @Test
  void whatWasAskedForWhileTheConnectionWasLostIsDoneAfterwards() throws Exception {
    try (Session session = client.openSession()) {
      GenerationStream cancelled = session.start(Scripted.request("cancelled", 1500).build());
      GenerationStream paused = session.start(Scripted.request("paused", 300).build());
      var cancelledProbe = Probe.on(cancelled, Long.MAX_VALUE);
      var pausedProbe = Probe.on(paused, Long.MAX_VALUE);
      Probe.await("tokens", () -> cancelledProbe.tokens() > 0 && pausedProbe.tokens() > 0);
      paused.pause();
      var unanswered = paused.reprioritize(Priority.level(3));
      lose(session, proxy);
      cancelled.cancel();
      var change = paused.reprioritize(Priority.level(4));
      GenerationStream started = session.start(Scripted.request("started", 10).build());
      proxy.refuse(false);
      assertEquals(FinishReason.CANCELLED, cancelledProbe.finished().reason());
      assertEquals(4, change.get(60, TimeUnit.SECONDS).level());
      assertEquals(Scripted.continuation("started", 10), started.text());
      assertFalse(paused.ended(), "it went on although it is paused");
      paused.unpause();
      pausedProbe.finished();
      assertEquals(Scripted.continuation("paused", 300), pausedProbe.text());
      assertEquals(3, unanswered.get(60, TimeUnit.SECONDS).level());
    }
  }

  @Test
  void aConnectionThatStaysLostFailsTheRequestsAsRetryable() throws Exception {
    var options = SessionOptions.builder().reconnectTimeout(Duration.ofMillis(300)).build();
    Session session = client.openSession(options);
    var probe = Probe.on(session.start(Scripted.request("gone", 1500).build()), Long.MAX_VALUE);
    Probe.await("a token", () -> probe.tokens() > 0);
    proxy.refuse(true);
    proxy.cut();
    var failure = assertThrows(ExecutionException.class, () -> probe.end.get(60, TimeUnit.SECONDS));
    var lost = assertInstanceOf(ConnectionLostException.class, failure.getCause());
    assertTrue(lost.retryable());
    assertTrue(Scripted.continuation("gone", 1500).startsWith(probe.text()));
    assertFalse(session.isOpen());
    assertThrows(
        ConnectionLostException.class, () -> session.start(Scripted.request("late", 1).build()));
    session.close();
  }

  @Test
  void aConnectionThatFellSilentIsFoundOutAndReplaced() throws Exception {
    var builder = VorrangClient.builder().target(proxy.address());
    // gRPC for Java sends no keepalive within less than 10 s, so this takes as long.
    builder.keepAlive(Duration.ofSeconds(10), Duration.ofSeconds(1));
    try (VorrangClient watchful = builder.build();
        Session session = watchful.openSession()) {
      var request = Scripted.request("silent", 900).creditTokens(64).build();
      var probe = Probe.on(session.start(request), Long.MAX_VALUE);
      Probe.await("a token", () -> probe.tokens() > 0);
      proxy.silence();
      assertFalse(probe.end.isDone());
      probe.finished();
      assertEquals(Scripted.continuation("silent", 900), probe.text());
    }
  }

  @Test
  void anIdleSessionIsThereAgainWhenItIsNeeded() throws Exception {
    try (Session session = client.openSession()) {
      String token = session.info().token();
      proxy.cut();
      Probe.await("another session", () -> !session.info().token().equals(token));
      assertEquals(Scripted.continuation("again", 5), session.start(Scripted.request("again", 5).build()).text());
    }
  }

  @Test
  void anotherProgramTakesARequestUpWithTheToken() throws Exception {
    String token;
    long kept;
    var head = new StringBuilder();
    String id = "resumed-" + System.nanoTime();
    var options = SessionOptions.builder().reconnectTimeout(Duration.ZERO).build();
    try (VorrangClient first = VorrangClient.builder().target(proxy.address()).build()) {
      Session session = first.openSession(options);
      token = session.info().token();
      var request = Scripted.request("other", 200).id(id).creditTokens(16).build();
      GenerationStream stream = session.start(request);
      Iterator<Event> events = stream.iterator();
      while (head.length() < 40) {
        if (events.next() instanceof Event.Delta delta) {
          head.append(delta.text());
        }
      }
      kept = stream.consumedSequence();
      proxy.cut(); // as if this program had died
    }
    var again = SessionOptions.builder().resumeToken(token).build();
    try (Session session = client.openSession(again)) {
      assertEquals(token, session.info().token());
      String tail = session.resume(id, kept).text();
      assertEquals(Scripted.continuation("other", 200), head + tail);
      GenerationStream unknown = session.resume("never-was", 0);
      var refused = assertThrows(VorrangException.class, unknown::result);
      assertEquals(Reason.UNKNOWN_REQUEST, refused.reason());
    }
  }

  @Test
  void aPointThatIsNotHeldIsOutOfRange() throws Exception {
    String id = "range-" + System.nanoTime();
    String token;
    try (VorrangClient first = VorrangClient.builder().target(proxy.address()).build()) {
      Session session =
          first.openSession(SessionOptions.builder().reconnectTimeout(Duration.ZERO).build());
      token = session.info().token();
      GenerationStream stream = session.start(Scripted.request("range", 500).id(id).build());
      stream.iterator().next();
      proxy.cut();
    }
    var again = SessionOptions.builder().resumeToken(token).build();
    try (Session session = client.openSession(again)) {
      var refused = assertThrows(VorrangException.class, session.resume(id, 100_000)::result);
      assertEquals(Reason.RESUME_OUT_OF_RANGE, refused.reason());
    }
  }

  @Test
  void aTokenThatNamesNoSessionIsRefused() {
    var options = SessionOptions.builder().resumeToken("no such token").build();
    var refused = assertThrows(VorrangException.class, () -> client.openSession(options));
    assertEquals(Reason.RESUME_OUT_OF_RANGE, refused.reason());
    assertEquals(0, client.transport().numOpen());
  }

  @Test
  void theNewerOfTwoSessionsHasTheRequests() throws Exception {
    Session old = client.openSession();
    String id = "taken-" + System.nanoTime();
    var oldProbe = Probe.on(old.start(Scripted.request("taken", 400).id(id).build()), Long.MAX_VALUE);
    Probe.await("a token", () -> oldProbe.tokens() > 0);
    var options = SessionOptions.builder().resumeToken(old.info().token()).build();
    try (Session session = client.openSession(options)) {
      assertEquals(Scripted.continuation("taken", 400), session.resume(id, 0).text());
    }
    var failure = assertThrows(ExecutionException.class, () -> oldProbe.end.get(60, TimeUnit.SECONDS));
    assertEquals(Reason.SESSION_STATE, ((VorrangException) failure.getCause()).reason());
    assertFalse(old.isOpen());
    old.close();
  }

  @Test
  void whenTheServerWasReplacedAcceptedRequestsFailAndNewOnesStart() throws Exception {
    var settings = Map.of("VORRANG_ENGINE__SCRIPTED_STEP_S", "0.005");
    try (ServerProcess first = ServerProcess.start(settings);
        ServerProcess second = ServerProcess.start(settings);
        CuttingProxy way = new CuttingProxy(first.port());
        VorrangClient other = VorrangClient.builder().target(way.address()).build()) {
      Session session = other.openSession();
      GenerationStream accepted = session.start(Scripted.request("accepted", 1500).build());
      Iterator<Event> events = accepted.iterator();
      events.next();
      String token = session.info().token();
      way.serverPort(second.port());
      lose(session, way);
      GenerationStream fresh = session.start(Scripted.request("fresh", 5).build());
      way.refuse(false);
      assertEquals(Scripted.continuation("fresh", 5), fresh.text());
      var refused =
          assertThrows(VorrangException.class, () -> events.forEachRemaining(event -> {}));
      assertEquals(Reason.RESUME_OUT_OF_RANGE, refused.reason());
      assertNotEquals(token, session.info().token());
      session.close();
    }
  }

  /** Cuts the connection, refuses new ones, and returns once the session has noticed. */
  private static void lose(Session session, CuttingProxy proxy) throws InterruptedException {
    proxy.refuse(true);
    proxy.cut();
    Probe.await("the session to notice", () -> !session.isConnected());
  }
}
