package io.vorrang.client;

import static org.junit.jupiter.api.Assertions.assertEquals;

import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;

/** A hundred streams on one TCP connection that breaks in the middle of all of them. */
@Timeout(180)
class HundredStreamsTest {
  private static final int NUM_STREAMS = 100;
  private static final int NUM_TOKENS = 300;
  private static final int CUT_AFTER_TOKENS = 20;
  private static final Map<String, String> SETTINGS =
      Map.of(
          "VORRANG_ENGINE__SCRIPTED_STEP_S", "0.002",
          "VORRANG_SCHEDULER__MAX_RUNNING_REQUESTS", "100",
          "VORRANG_KV__NUM_BLOCKS", "4096");

  @Test
  void everyTextIsCompleteAndNothingIsRepeated() throws Exception {
    try (ServerProcess server = ServerProcess.start(SETTINGS);
        CuttingProxy proxy = new CuttingProxy(server.port());
        VorrangClient client = VorrangClient.builder().target(proxy.address()).build()) {
      List<Session> sessions = new ArrayList<>();
      for (int i = 0; i < 4; i++) {
        sessions.add(client.openSession());
      }
      List<String> tokens = sessions.stream().map(session -> session.info().token()).toList();
      List<Probe> probes = new ArrayList<>();
      for (int i = 0; i < NUM_STREAMS; i++) {
        // A small window keeps the server near the reader, so that the cut is in the middle on both sides.
        var request = Scripted.request("stream " + i, NUM_TOKENS).creditTokens(32).build();
        probes.add(stoppingBeforeTheCut(sessions.get(i % sessions.size()).start(request)));
      }
      Probe.await(
          "tokens of everybody",
          () -> probes.stream().allMatch(probe -> probe.tokens() >= CUT_AFTER_TOKENS));
      assertEquals(0, probes.stream().filter(probe -> probe.end.isDone()).count());
      proxy.refuse(true);
      proxy.cut();
      for (Session session : sessions) {
        Probe.await("the session to notice", () -> !session.isConnected());
      }
      proxy.refuse(false);
      probes.forEach(probe -> probe.request(Long.MAX_VALUE));
      for (int i = 0; i < NUM_STREAMS; i++) {
        assertEquals(NUM_TOKENS, probes.get(i).finished().usage().outputTokens());
        assertEquals(Scripted.continuation("stream " + i, NUM_TOKENS), probes.get(i).text());
        assertNoGap(probes.get(i));
      }
      assertEquals(tokens, sessions.stream().map(session -> session.info().token()).toList());
    }
  }

  /** Asks for one event after the other until enough tokens are there, so that no stream ends before the cut. */
  private static Probe stoppingBeforeTheCut(EventStream stream) {
    var probe =
        new Probe(1) {
          @Override
          public void onNext(Event event) {
            super.onNext(event);
            if (tokens() < CUT_AFTER_TOKENS) {
              request(1);
            }
          }
        };
    stream.subscribe(probe);
    return probe;
  }

  private static void assertNoGap(Probe probe) {
    int tokens = 0;
    for (Event event : probe.events) {
      if (event instanceof Event.Delta delta) {
        assertEquals(tokens, delta.firstTokenIndex());
        tokens += delta.tokenIds().size();
      }
    }
    assertEquals(NUM_TOKENS, tokens);
  }
}
