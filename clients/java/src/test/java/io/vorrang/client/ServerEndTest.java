package io.vorrang.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertInstanceOf;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.time.Duration;
import java.util.Map;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;

/** What needs servers with settings of their own: their end, and their limits. */
@Timeout(180)
class ServerEndTest {
  @Test
  void aServerThatDrainsSaysSoAndLetsRequestsEnd() throws Exception {
    var settings =
        Map.of("VORRANG_ENGINE__SCRIPTED_STEP_S", "0.005", "VORRANG_SERVER__GRACE_S", "20");
    try (ServerProcess server = ServerProcess.start(settings);
        VorrangClient client = VorrangClient.builder().target(server.address).build()) {
      Session session = client.openSession();
      var probe = Probe.on(session.start(Scripted.request("drain", 200).build()), Long.MAX_VALUE);
      Probe.await("a token", () -> probe.tokens() > 0);
      server.terminate();
      Duration left = session.goingAway().get(60, TimeUnit.SECONDS);
      assertTrue(left.compareTo(Duration.ofSeconds(20)) <= 0 && !left.isNegative());
      var late = session.start(Scripted.request("late", 1).build());
      var refused = assertThrows(VorrangException.class, late::result);
      assertEquals(Reason.DRAINING, refused.reason());
      assertTrue(refused.retryable());
      assertTrue(refused.retryAfter().isPresent());
      assertEquals(FinishReason.LENGTH, probe.finished().reason());
      assertEquals(Scripted.continuation("drain", 200), probe.text());
      server.awaitEnd();
      Probe.await("the session's end", () -> !session.isOpen());
      session.close();
    }
  }

  @Test
  void aServerThatDiesIsALostConnection() throws Exception {
    try (ServerProcess server = ServerProcess.start(Map.of("VORRANG_ENGINE__SCRIPTED_STEP_S", "0.005"));
        VorrangClient client = VorrangClient.builder().target(server.address).build()) {
      var options = SessionOptions.builder().reconnectTimeout(Duration.ofMillis(300)).build();
      Session session = client.openSession(options);
      var probe = Probe.on(session.start(Scripted.request("die", 1500).build()), Long.MAX_VALUE);
      Probe.await("a token", () -> probe.tokens() > 0);
      server.kill();
      var failure = assertThrows(ExecutionException.class, () -> probe.end.get(60, TimeUnit.SECONDS));
      assertInstanceOf(ConnectionLostException.class, failure.getCause());
      var refused = assertThrows(VorrangException.class, () -> client.openSession(options));
      assertInstanceOf(ConnectionLostException.class, refused);
      assertThrows(ConnectionLostException.class, () -> client.awaitReady(Duration.ofMillis(200)));
    }
  }

  @Test
  void limitsAreTypedErrors() throws Exception {
    var settings =
        Map.of(
            "VORRANG_ENGINE__SCRIPTED_STEP_S", "0.002",
            "VORRANG_SCHEDULER__MAX_RUNNING_REQUESTS", "1",
            "VORRANG_SCHEDULER__MAX_WAITING_REQUESTS", "1",
            "VORRANG_SCHEDULER__MAX_STEP_TOKENS", "512",
            "VORRANG_SESSION__SLOW_CLIENT_TIMEOUT_S", "0.3",
            "VORRANG_KV__NUM_BLOCKS", "16");
    try (ServerProcess server = ServerProcess.start(settings);
        VorrangClient client = VorrangClient.builder().target(server.address).build();
        Session session = client.openSession()) {
      GenerationStream seat = session.start(Scripted.request("seat", 200).build());
      var seatProbe = Probe.on(seat, Long.MAX_VALUE);
      Probe.await("it runs", () -> seatProbe.tokens() > 0);
      var waits = session.start(Scripted.request("waits", 5).priority(Priority.level(5)).build());
      // Of the same level: only such starts are sure to arrive in their order.
      var queueFull = session.start(Scripted.request("full", 5).priority(Priority.level(5)).build());
      var full = assertThrows(VorrangException.class, queueFull::result);
      assertEquals(Reason.QUEUE_FULL, full.reason());
      assertTrue(full.retryable() && full.retryAfter().isPresent());
      var urgent = session.start(Scripted.request("urgent", 5).priority(Priority.level(1)).build());
      var displaced = assertThrows(VorrangException.class, waits::result);
      assertEquals(Reason.DISPLACED, displaced.reason());
      assertTrue(displaced.retryable());
      seat.cancel();
      assertEquals(Scripted.continuation("urgent", 5), urgent.text());

      var slow = Probe.on(session.start(Scripted.request("slow", 200).creditTokens(4).build()), 2);
      var failure =
          assertThrows(
              ExecutionException.class,
              () -> {
                Probe.await("the slow one's end", () -> session.alive() == 0);
                slow.request(Long.MAX_VALUE);
                slow.end.get(60, TimeUnit.SECONDS);
              });
      var tooSlow = assertInstanceOf(VorrangException.class, failure.getCause());
      assertEquals(Reason.SLOW_CONSUMER, tooSlow.reason());
      assertEquals(4, tooSlow.usage().orElseThrow().outputTokens());
      assertEquals(Scripted.continuation("slow", 4), slow.text());

      var tooLong = Request.text("x".repeat(600)).maxTokens(1).build();
      assertEquals(
          Reason.POOL_EXCEEDED,
          assertThrows(VorrangException.class, () -> client.generate(tooLong)).reason());
      assertFalse(session.alive() > 0);
    }
  }
}
