package io.vorrang.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertInstanceOf;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.time.Duration;
import java.util.List;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.api.extension.ExtendWith;

/** Calls without a session, against the real server. */
@ExtendWith(SharedServer.class)
@Timeout(180)
class CallTest {
  private VorrangClient client;

  @BeforeEach
  void open() {
    client = VorrangClient.builder().target(SharedServer.address()).build();
  }

  @AfterEach
  void close() {
    client.close();
  }

  @Test
  void generateGivesTheWholeOutput() {
    var request = Scripted.request("unary", 20).priority(Priority.INTERACTIVE).build();
    Result result = client.generate(request);
    assertEquals(Scripted.continuation("unary", 20), result.text());
    assertEquals(20, result.usage().outputTokens());
    assertEquals(-10, result.accepted().level());
  }

  @Test
  void generateStreamGivesItsEvents() throws Exception {
    var probe = Probe.on(client.generateStream(Scripted.request("stream", 100).build()), 1);
    Probe.await("the first event", () -> probe.events.size() == 1);
    assertInstanceOf(Event.Accepted.class, probe.events.get(0));
    probe.request(Long.MAX_VALUE);
    assertEquals(FinishReason.LENGTH, probe.finished().reason());
    assertEquals(Scripted.continuation("stream", 100), probe.text());
    Probe.await("no call is open", () -> client.transport().numOpen() == 0);
  }

  @Test
  void whatIsNotReadIsHeldBackAndNotLost() throws Exception {
    CallStream stream = client.generateStream(Scripted.request("held back", 400).build());
    var probe = Probe.on(stream, 5);
    Probe.await("five events", () -> probe.events.size() == 5);
    client.generate(Scripted.request("witness", 100).build());
    assertEquals(5, probe.events.size());
    probe.request(Long.MAX_VALUE);
    probe.finished();
    assertEquals(Scripted.continuation("held back", 400), probe.text());
  }

  @Test
  void cancellingACallIsAnErrorOfItsStream() throws Exception {
    CallStream stream = client.generateStream(Scripted.request("cancel", 1500).build());
    var probe = Probe.on(stream, Long.MAX_VALUE);
    Probe.await("a token", () -> probe.tokens() > 0);
    stream.cancel();
    var failure = assertThrows(ExecutionException.class, () -> probe.end.get(60, TimeUnit.SECONDS));
    assertEquals(Reason.CANCELLED, ((VorrangException) failure.getCause()).reason());
  }

  @Test
  void aDeadlineEndsACall() {
    var request = Scripted.request("deadline", 1500).build();
    var unary =
        assertThrows(VorrangException.class, () -> client.generate(request, Duration.ofMillis(100)));
    assertEquals(Reason.DEADLINE_EXCEEDED, unary.reason());
    CallStream stream = client.generateStream(request, Duration.ofMillis(100));
    var streamed = assertThrows(VorrangException.class, stream::result);
    assertEquals(Reason.DEADLINE_EXCEEDED, streamed.reason());
  }

  @Test
  void refusalsNameTheField() {
    var bad = Request.text("bad").sampling(s -> s.setTopP(2)).build();
    var refused = assertThrows(VorrangException.class, () -> client.generate(bad));
    assertEquals(Reason.INVALID_REQUEST, refused.reason());
    assertEquals("sampling.top_p", refused.violations().get(0).field());
    var streamed = assertThrows(VorrangException.class, client.generateStream(bad)::result);
    assertEquals(Reason.INVALID_REQUEST, streamed.reason());
  }

  @Test
  void reasonsOfTheRealServer() {
    assertReason(Reason.EMPTY_PROMPT, Request.tokens(List.of()).build());
    assertReason(Reason.CONTEXT_EXCEEDED, Request.text("x".repeat(5000)).build());
    assertReason(Reason.UNKNOWN_MODEL, Request.text("x").model("no such model").build());
    assertReason(Reason.UNKNOWN_MODEL, Request.text("x").spec(s -> s.setAdapter("lora")).build());
    assertReason(Reason.INVALID_REQUEST, Request.text("x").spec(s -> s.clearPrompt()).build());
  }

  @Test
  void tokensAndModel() {
    assertEquals(List.of(104, 105), client.tokenize("hi"));
    assertEquals("hi", client.detokenize(List.of(104, 105)));
    assertEquals("scripted", client.model().getName());
    assertTrue(client.model().getHasChatTemplate());
    client.awaitReady(Duration.ofSeconds(5));
  }

  private void assertReason(Reason reason, Request request) {
    var refused = assertThrows(VorrangException.class, () -> client.generate(request));
    assertEquals(reason, refused.reason(), refused.getMessage());
  }
}
