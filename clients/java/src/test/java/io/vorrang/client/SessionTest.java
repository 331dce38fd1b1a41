package io.vorrang.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertInstanceOf;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.api.extension.ExtendWith;

/** What a session promises, against the real server. */
@ExtendWith(SharedServer.class)
@Timeout(180)
class SessionTest {
  private VorrangClient client;
  private Session session;

  @BeforeEach
  void open() {
    client = VorrangClient.builder().target(SharedServer.address()).build();
    session = client.openSession();
  }

  @AfterEach
  void close() {
    client.close();
  }

  @Test
  void theOpeningSaysWhatTheServerOffers() {
    SessionInfo info = session.info();
    assertTrue(info.token().length() >= 32);
    assertEquals("priority", info.policy());
    assertEquals(0, info.defaultLevel());
    assertTrue(info.limits().getMaxRequestTokens() > 0);
  }

  @Test
  void anIteratorSeesEveryEventInOrder() {
    var events = new ArrayList<Event>();
    session.start(Scripted.request("hello", 40).build()).forEach(events::add);
    assertInstanceOf(Event.Accepted.class, events.get(0));
    assertInstanceOf(Event.Started.class, events.get(1));
    assertInstanceOf(Event.Finished.class, events.get(events.size() - 1));
    int index = 0;
    var text = new StringBuilder();
    for (Event event : events) {
      if (event instanceof Event.Delta delta) {
        assertEquals(index, delta.firstTokenIndex());
        index += delta.tokenIds().size();
        text.append(delta.text());
      }
    }
    assertEquals(Scripted.continuation("hello", 40), text.toString());
    assertEquals(0, session.alive());
  }

  @Test
  void aResultIsTheWholeOutput() {
    Result result = session.start(Scripted.request("abc", 12).seed(7).build()).result();
    assertEquals(Scripted.continuation("abc", 12), result.text());
    assertEquals(12, result.tokenIds().size());
    assertEquals(FinishReason.LENGTH, result.finishReason());
    assertEquals(12, result.usage().outputTokens());
    assertEquals(3, result.usage().promptTokens());
    assertEquals(7, result.accepted().seed());
  }

  @Test
  void aConversationGoesThroughTheModelsTemplate() {
    var messages = List.of(Message.system("be brief"), Message.user("hi"));
    Request request = Request.chat(messages).temperature(0).maxTokens(8).build();
    String prompt = "system: be brief\nuser: hi\nassistant: ";
    assertEquals(Scripted.continuation(prompt, 8), session.start(request).text());
    assertEquals(prompt.length(), client.tokenize(request).size());
  }

  @Test
  void aSubscriberGetsWhatItAskedForAndNoMore() throws Exception {
    GenerationStream stream = session.start(Scripted.request("demand", 30).build());
    var probe = Probe.on(stream, 0);
    Probe.await("the end of the request", stream::ended);
    assertEquals(0, probe.events.size());
    probe.request(2);
    Probe.await("two events", () -> probe.events.size() == 2);
    assertFalse(probe.end.isDone());
    probe.request(Long.MAX_VALUE);
    assertEquals(FinishReason.LENGTH, probe.finished().reason());
    assertEquals(Scripted.continuation("demand", 30), probe.text());
    assertFalse(probe.overlapped);
  }

  @Test
  void aStreamHasOneReader() throws Exception {
    GenerationStream stream = session.start(Scripted.request("one", 4).build());
    var first = Probe.on(stream, Long.MAX_VALUE);
    var second = Probe.on(stream, 1);
    var refused = assertThrows(ExecutionException.class, () -> second.end.get(5, TimeUnit.SECONDS));
    assertInstanceOf(IllegalStateException.class, refused.getCause());
    assertThrows(IllegalStateException.class, stream::iterator);
    first.finished();
  }

  @Test
  void aDemandOfNothingIsAnErrorAndCancels() throws Exception {
    GenerationStream stream = session.start(Scripted.request("wrong", 1500).build());
    var probe = Probe.on(stream, 1);
    probe.request(0);
    var error = assertThrows(ExecutionException.class, () -> probe.end.get(5, TimeUnit.SECONDS));
    assertInstanceOf(IllegalArgumentException.class, error.getCause());
    Probe.await("the cancelled request's end", stream::ended);
  }

  @Test
  void aSubscriberThatThrowsIsToldAndItsRequestCancelled() throws Exception {
    for (Throwable fault : List.of(new IllegalStateException("fault"), new AssertionError("fault"))) {
      GenerationStream stream = session.start(Scripted.request("throws", 1500).build());
      var probe =
          new Probe(Long.MAX_VALUE) {
            @Override
            public void onNext(Event event) {
              if (fault instanceof Error error) {
                throw error;
              }
              throw (RuntimeException) fault;
            }
          };
      stream.subscribe(probe);
      var failure = assertThrows(ExecutionException.class, () -> probe.end.get(5, TimeUnit.SECONDS));
      assertEquals(fault, failure.getCause());
      Probe.await("no request alive", () -> session.alive() == 0);
    }
  }

  @Test
  void cancellingEndsARequestOnceWithItsOutputSoFar() {
    GenerationStream stream = session.start(Scripted.request("cancel", 1500).build());
    var text = new StringBuilder();
    Event.Finished finished = null;
    for (Event event : stream) {
      if (event instanceof Event.Delta delta) {
        text.append(delta.text());
        stream.cancel();
        stream.cancel();
      } else if (event instanceof Event.Finished last) {
        finished = last;
      }
    }
    assertEquals(FinishReason.CANCELLED, finished.reason());
    assertTrue(Scripted.continuation("cancel", 1500).startsWith(text.toString()));
    assertEquals(finished.usage().outputTokens(), text.length());
    stream.cancel(); // harmless
  }

  @Test
  void cancellingASubscriptionCancelsTheRequest() throws Exception {
    GenerationStream stream = session.start(Scripted.request("subscription", 1500).build());
    var probe = Probe.on(stream, 3);
    Probe.await("an event", () -> !probe.events.isEmpty());
    probe.cancel();
    Probe.await("no request alive", () -> session.alive() == 0);
    assertFalse(probe.end.isDone());
  }

  @Test
  void closingAStreamCancelsItsRequest() throws Exception {
    try (GenerationStream stream = session.start(Scripted.request("closing", 1500).build())) {
      assertInstanceOf(Event.Accepted.class, stream.iterator().next());
    }
    Probe.await("no request alive", () -> session.alive() == 0);
  }

  @Test
  void prioritiesAreEchoedAndChanged() throws Exception {
    var request = Scripted.request("priority", 1500).priority(Priority.BATCH).build();
    GenerationStream stream = session.start(request);
    var probe = Probe.on(stream, Long.MAX_VALUE);
    Probe.await("the first event", () -> !probe.events.isEmpty());
    var accepted = (Event.Accepted) probe.events.get(0);
    assertEquals(10, accepted.level());
    assertEquals(10, accepted.requestedLevel());
    assertFalse(accepted.capped());
    var first = stream.reprioritize(Priority.level(-7));
    var second = stream.reprioritize(Priority.INTERACTIVE);
    assertEquals(-7, first.get(5, TimeUnit.SECONDS).level());
    assertEquals(-10, second.get(5, TimeUnit.SECONDS).level());
    stream.cancel();
    probe.finished();
    var changes = probe.events.stream().filter(e -> e instanceof Event.PriorityChanged).toList();
    assertEquals(2, changes.size());
  }

  @Test
  void aPriorityThatIsNoneIsRejectedAndTheRequestGoesOn() throws Exception {
    GenerationStream stream = session.start(Scripted.request("reject", 300).build());
    var answer = stream.reprioritize(Priority.ofClass("no such class"));
    var failure = assertThrows(ExecutionException.class, () -> answer.get(5, TimeUnit.SECONDS));
    var rejected = assertInstanceOf(CommandRejectedException.class, failure.getCause());
    assertEquals(Reason.INVALID_REQUEST, rejected.reason());
    assertEquals("priority.class_name", rejected.violations().get(0).field());
    assertEquals(Scripted.continuation("reject", 300), stream.text());
  }

  @Test
  void reprioritisingWhatHasEndedFails() {
    GenerationStream stream = session.start(Scripted.request("ended", 2).build());
    stream.text();
    var answer = stream.reprioritize(Priority.BATCH);
    var failure = assertThrows(ExecutionException.class, () -> answer.get(5, TimeUnit.SECONDS));
    assertEquals(Reason.UNKNOWN_REQUEST, ((VorrangException) failure.getCause()).reason());
  }

  @Test
  void theSessionsPriorityHoldsForStartsWithoutOne() {
    var options = SessionOptions.builder().defaultPriority(Priority.BATCH).build();
    try (Session batch = client.openSession(options)) {
      assertEquals(10, batch.info().defaultLevel());
      var own = Scripted.request("own", 1).priority(Priority.level(3)).build();
      assertEquals(10, batch.start(Scripted.request("default", 1).build()).result().accepted().level());
      assertEquals(3, batch.start(own).result().accepted().level());
    }
  }

  @Test
  void aStalledSubscriberHoldsItsWindowAndNobodyElse() throws Exception {
    var request = Scripted.request("stalled", 200).creditTokens(8).build();
    GenerationStream stalled = session.start(request);
    var probe = Probe.on(stalled, 2); // accepted and started, and not one token
    for (int i = 0; i < 3; i++) {
      String prompt = "sibling " + i;
      assertEquals(
          Scripted.continuation(prompt, 100), session.start(Scripted.request(prompt, 100).build()).text());
    }
    assertFalse(stalled.ended());
    assertEquals(2, probe.events.size());
    probe.request(1);
    Probe.await("one more event", () -> probe.events.size() == 3);
    int seen = probe.tokens();
    assertTrue(seen <= 8, "the server sent " + seen + " tokens on a credit of 8");
    probe.request(Long.MAX_VALUE);
    Event.Finished finished = probe.finished();
    assertEquals(Scripted.continuation("stalled", 200), probe.text());
    assertTrue(finished.usage().parked().toNanos() > 0, "it was never without credit");
  }

  @Test
  void creditIsGrantedAsEventsAreTakenEvenOneByOne() throws Exception {
    var probe = Probe.on(session.start(Scripted.request("by one", 25).creditTokens(1).build()), 1);
    for (int i = 1; !probe.end.isDone(); i++) {
      int wanted = i;
      Probe.await("another event", () -> probe.events.size() >= wanted || probe.end.isDone());
      assertTrue(probe.events.size() <= wanted, "more events than were asked for");
      probe.request(1);
    }
    probe.finished();
    assertEquals(Scripted.continuation("by one", 25), probe.text());
    for (Event event : probe.events) {
      if (event instanceof Event.Delta delta) {
        assertTrue(delta.tokenIds().size() <= 1, "more than was granted");
      }
    }
  }

  @Test
  void aSubscriberThatBlocksHoldsUpNobodyElse() throws Exception {
    var release = new CountDownLatch(1);
    var blockers = new ArrayList<Probe>();
    for (int i = 0; i < 8; i++) {
      var probe =
          new Probe(Long.MAX_VALUE) {
            @Override
            public void onNext(Event event) {
              try {
                release.await();
              } catch (InterruptedException interruption) {
                Thread.currentThread().interrupt();
              }
              super.onNext(event);
            }
          };
      session.start(Scripted.request("blocked " + i, 20).build()).subscribe(probe);
      blockers.add(probe);
    }
    String text = session.start(Scripted.request("free", 50).build()).text();
    assertEquals(Scripted.continuation("free", 50), text);
    assertTrue(blockers.stream().allMatch(p -> p.events.isEmpty()));
    release.countDown();
    for (int i = 0; i < 8; i++) {
      blockers.get(i).finished();
      assertEquals(Scripted.continuation("blocked " + i, 20), blockers.get(i).text());
    }
  }

  @Test
  void aPausedRequestStandsStillUntilItIsUnpaused() throws Exception {
    var request = Scripted.request("pause", 400).build();
    GenerationStream stream = session.start(request);
    var probe = Probe.on(stream, Long.MAX_VALUE);
    Probe.await("a token", () -> probe.tokens() > 0);
    stream.pause();
    // Commands of one session are obeyed in order: what it sends next shows that the pause is in force.
    stream.reprioritize(Priority.BATCH).get(5, TimeUnit.SECONDS);
    session.start(Scripted.request("witness", 60).build()).text();
    int seen = probe.tokens();
    assertTrue(seen < 400, "it had ended before it was paused");
    session.start(Scripted.request("second witness", 60).build()).text();
    assertEquals(seen, probe.tokens());
    stream.unpause();
    assertTrue(probe.finished().usage().parked().toNanos() > 0);
    assertEquals(Scripted.continuation("pause", 400), probe.text());
  }

  @Test
  void aTimeBudgetEndsARequestWithWhatItHas() {
    var request =
        Scripted.request("budget", 1500).totalTimeout(Duration.ofMillis(100)).build();
    Result result = session.start(request).result();
    assertEquals(FinishReason.TIME_LIMIT, result.finishReason());
    assertEquals(result.usage().outputTokens(), result.tokenIds().size());
    assertTrue(Scripted.continuation("budget", 1500).startsWith(result.text()));
  }

  @Test
  void aRefusedStartIsTheStreamsFailure() {
    GenerationStream stream = session.start(Request.text("bad").temperature(-1).build());
    var refused = assertThrows(VorrangException.class, stream::result);
    assertEquals(Reason.INVALID_REQUEST, refused.reason());
    assertFalse(refused.retryable());
    assertEquals("sampling.temperature", refused.violations().get(0).field());
    assertEquals(0, session.alive());
  }

  @Test
  void anIdMayBeAliveOnce() {
    String id = "twice-" + System.nanoTime();
    GenerationStream first = session.start(Scripted.request("first", 1500).id(id).build());
    var here =
        assertThrows(
            VorrangException.class, () -> session.start(Scripted.request("x", 1).id(id).build()));
    assertEquals(Reason.DUPLICATE_REQUEST_ID, here.reason());
    first.iterator().next(); // it is accepted
    try (Session other = client.openSession()) {
      GenerationStream second = other.start(Scripted.request("other", 1).id(id).build());
      var there = assertThrows(VorrangException.class, second::result);
      assertEquals(Reason.DUPLICATE_REQUEST_ID, there.reason());
    }
    first.cancel();
  }

  @Test
  void manyRequestsShareOneSession() throws Exception {
    int limit = session.info().limits().getMaxSessionRequests();
    int number = Math.min(limit, 200);
    Map<String, CompletableFuture<Result>> results = new HashMap<>();
    for (int i = 0; i < number; i++) {
      String prompt = "request " + i;
      var request = Scripted.request(prompt, 20).priority(Priority.level(i % 21 - 10)).build();
      results.put(prompt, session.start(request).resultAsync());
    }
    for (var entry : results.entrySet()) {
      Result result = entry.getValue().get(30, TimeUnit.SECONDS);
      assertEquals(Scripted.continuation(entry.getKey(), 20), result.text());
    }
    assertEquals(0, session.alive());
  }

  @Test
  void manyThreadsShareOneSession() throws Exception {
    var work = new ArrayList<CompletableFuture<Void>>();
    for (int thread = 0; thread < 8; thread++) {
      int number = thread;
      work.add(
          CompletableFuture.runAsync(
              () -> {
                for (int i = 0; i < 10; i++) {
                  String prompt = "thread " + number + " " + i;
                  GenerationStream stream = session.start(Scripted.request(prompt, 10).build());
                  stream.pause();
                  stream.unpause();
                  assertEquals(Scripted.continuation(prompt, 10), stream.text());
                }
              },
              command -> new Thread(command).start()));
    }
    for (var done : work) {
      done.get(30, TimeUnit.SECONDS);
    }
  }

  @Test
  void moreThanASessionMayHoldIsRefused() {
    int limit = session.info().limits().getMaxSessionRequests();
    for (int i = 0; i < limit; i++) {
      session.start(Scripted.request("full " + i, 1500).creditTokens(1).build());
    }
    GenerationStream tooMany = session.start(Scripted.request("too many", 1).build());
    var refused = assertThrows(VorrangException.class, tooMany::result);
    assertEquals(Reason.SESSION_LIMIT, refused.reason());
  }

  @Test
  void afterHalfCloseRequestsRunToTheirEnds() {
    GenerationStream stream = session.start(Scripted.request("half", 60).creditTokens(2).build());
    session.halfClose();
    assertFalse(session.isOpen());
    var refused =
        assertThrows(
            VorrangException.class, () -> session.start(Scripted.request("late", 1).build()));
    assertEquals(Reason.SESSION_STATE, refused.reason());
    assertEquals(Scripted.continuation("half", 60), stream.text());
  }

  @Test
  void closingASessionCancelsWhatRuns() {
    GenerationStream stream = session.start(Scripted.request("close", 1500).build());
    stream.reprioritize(Priority.BATCH).join(); // it is the server's by now
    session.close();
    Result result = stream.result();
    assertEquals(FinishReason.CANCELLED, result.finishReason());
    session.close(); // harmless
    assertThrows(
        ConnectionLostException.class, () -> session.start(Scripted.request("late", 1).build()));
  }

  @Test
  void aWaitingThreadCanBeInterrupted() {
    GenerationStream stream = session.start(Scripted.request("wait", 1500).build());
    stream.pause();
    Thread.currentThread().interrupt();
    assertThrows(VorrangException.class, stream::result);
    assertTrue(Thread.interrupted());
    stream.cancel();
  }

  @Test
  void whoWaitsIsToldWhenStreamOrClientAreClosed() throws Exception {
    GenerationStream stream = session.start(Scripted.request("told", 1500).build());
    var result = stream.resultAsync();
    stream.close();
    assertEquals(FinishReason.CANCELLED, result.get(60, TimeUnit.SECONDS).finishReason());
    CallStream call = client.generateStream(Scripted.request("told", 1500).build());
    var never = call.resultAsync();
    client.close();
    var failure = assertThrows(ExecutionException.class, () -> never.get(60, TimeUnit.SECONDS));
    assertInstanceOf(VorrangException.class, failure.getCause());
  }

  @Test
  void closingTheClientEndsThreadsAndStreams() throws Exception {
    GenerationStream stream = session.start(Scripted.request("leak", 1500).build());
    var probe = Probe.on(stream, 1);
    CallStream call = client.generateStream(Scripted.request("leak", 1500).build());
    assertEquals(2, client.transport().numOpen());
    Probe.await("an event", () -> !probe.events.isEmpty());
    client.close();
    assertTrue(stream.ended());
    assertTrue(client.transport().channel().isTerminated());
    assertEquals(0, client.transport().numOpen());
    call.close();
    Probe.await(
        "no thread of ours",
        () ->
            Thread.getAllStackTraces().keySet().stream()
                .noneMatch(thread -> thread.getName().startsWith("vorrang-")));
    assertThrows(IllegalStateException.class, () -> client.openSession());
  }
}
