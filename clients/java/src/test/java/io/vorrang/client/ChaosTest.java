package io.vorrang.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.util.ArrayList;
import java.util.List;
import java.util.Random;
import java.util.Set;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import java.util.stream.LongStream;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.api.extension.ExtendWith;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.MethodSource;

/**
 * Random commands, readers and cuts of the connection. Whatever happens, a request ends once, its text
 * is that of an undisturbed one as far as it goes, and nothing is left behind.
 */
@ExtendWith(SharedServer.class)
@Timeout(240)
class ChaosTest {
  private static final int NUM_REQUESTS = 60;

  private record Run(String prompt, int numTokens, GenerationStream stream, Probe probe) {}

  private record Change(int level, CompletableFuture<Event.PriorityChanged> answer) {}

  private final List<Change> changes = new ArrayList<>();

  /** As many as {@code VORRANG_CHAOS_SEEDS} says, 3 unless set. */
  static LongStream seeds() {
    String number = System.getenv("VORRANG_CHAOS_SEEDS");
    return LongStream.rangeClosed(1, number == null ? 3 : Long.parseLong(number));
  }

  @ParameterizedTest
  @MethodSource("seeds")
  void whateverHappensARequestEndsOnceWithItsOwnText(long seed) throws Exception {
    var random = new Random(seed);
    try (CuttingProxy proxy = new CuttingProxy(SharedServer.port());
        VorrangClient client = VorrangClient.builder().target(proxy.address()).build()) {
      Session session = client.openSession();
      List<Run> runs = new ArrayList<>();
      for (int i = 0; i < NUM_REQUESTS; i++) {
        runs.add(start(session, random, seed + "/" + i));
        for (int action = random.nextInt(4); action > 0; action--) {
          disturb(runs.get(random.nextInt(runs.size())), random);
        }
        if (random.nextInt(12) == 0) {
          Thread.sleep(random.nextInt(20));
          proxy.cut();
        }
      }
      for (Run run : runs) {
        run.stream.unpause();
        run.probe.request(Long.MAX_VALUE);
      }
      for (Run run : runs) {
        check(run);
      }
      for (Change change : changes) {
        check(change);
      }
      assertEquals(0, session.alive());
      session.close();
      assertEquals(0, client.transport().numOpen());
    }
  }

  private static Run start(Session session, Random random, String name) {
    int numTokens = 1 + random.nextInt(80);
    String prompt = "chaos " + name;
    var request =
        Scripted.request(prompt, numTokens)
            .creditTokens(1 + random.nextInt(40))
            .priority(Priority.level(random.nextInt(41) - 20))
            .build();
    GenerationStream stream = session.start(request);
    return new Run(prompt, numTokens, stream, Probe.on(stream, random.nextInt(5)));
  }

  private void disturb(Run run, Random random) {
    switch (random.nextInt(6)) {
      case 0 -> run.stream.pause();
      case 1 -> run.stream.unpause();
      case 2 -> {
        int level = random.nextInt(41) - 20;
        changes.add(new Change(level, run.stream.reprioritize(Priority.level(level))));
      }
      case 3 -> {
        if (random.nextInt(3) == 0) {
          run.stream.cancel();
        }
      }
      default -> run.probe.request(1 + random.nextInt(30));
    }
  }

  /** No cut could lose it: it is in force, or the server refused it, as too late or one too many. */
  private static void check(Change change) throws Exception {
    try {
      assertEquals(change.level, change.answer.get(60, TimeUnit.SECONDS).level());
    } catch (ExecutionException refused) {
      var reason = ((VorrangException) refused.getCause()).reason();
      var allowed = Set.of(Reason.UNKNOWN_REQUEST, Reason.SESSION_LIMIT);
      assertTrue(allowed.contains(reason), refused::toString);
    }
  }

  private static void check(Run run) throws Exception {
    Event.Finished finished = run.probe.finished();
    String whole = Scripted.continuation(run.prompt, run.numTokens);
    String text = run.probe.text();
    if (finished.reason() == FinishReason.CANCELLED) {
      assertTrue(whole.startsWith(text), run.prompt);
    } else {
      assertEquals(FinishReason.LENGTH, finished.reason());
      assertEquals(whole, text, run.prompt);
    }
    assertEquals(finished.usage().outputTokens(), run.probe.tokens());
    assertEquals(1, run.probe.events.stream().filter(e -> e instanceof Event.Finished).count());
    assertFalse(run.probe.overlapped);
  }
}
