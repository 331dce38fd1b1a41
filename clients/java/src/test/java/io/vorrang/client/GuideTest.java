package io.vorrang.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.vorrang.examples.Guide;
import java.io.ByteArrayOutputStream;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;

/** What docs/clients/java.md shows works, against the real server. */
@Timeout(180)
class GuideTest {
  private static final String STORY = "Once upon a time";

  private final ByteArrayOutputStream bytes = new ByteArrayOutputStream();
  private final PrintStream out = new PrintStream(bytes, true, StandardCharsets.UTF_8);

  @Test
  void itsFirstProgramsWork() throws Exception {
    var settings =
        Map.of(
            "VORRANG_SCHEDULER__MAX_RUNNING_REQUESTS", "1",
            "VORRANG_ENGINE__SCRIPTED_STEP_S", "0.003");
    try (ServerProcess server = ServerProcess.start(settings);
        VorrangClient client = VorrangClient.builder().target(server.address).build()) {
      assertEquals(Scripted.continuation(STORY, 32), Guide.answer(server.address));
      Guide.several(client, out);
      String several = written();
      assertTrue(several.matches("(-\\d+[.,]\\d .{12}\\R){3}"), several);
      assertTrue(List.of(" yes", " no").contains(Guide.choose(client)));
      try (Session session = Guide.session(client)) {
        String said = Guide.overtake(session, out);
        assertTrue(said.matches("LENGTH after [01] preemptions"), said);
        String question = Scripted.continuation("user: What is the capital of France?\nassistant: ", 16);
        assertEquals(question + System.lineSeparator(), written());

        Guide.events(session.start(Scripted.request("events", 5).build()), out);
        assertEquals("[level 0]" + Scripted.continuation("events", 5) + "[LENGTH, 5 tokens]", written());

        GenerationStream stream = session.start(Scripted.request("urgent", 1500).build());
        assertEquals(-20, Guide.urgent(stream));
        assertEquals(FinishReason.CANCELLED, Guide.cancel(stream).finishReason());
        assertEquals(FinishReason.TIME_LIMIT, Guide.deadline(session).finishReason());

        var text = new StringBuilder();
        Guide.slowly(session, text::append);
        assertEquals(Scripted.continuation(STORY, 100), text.toString());
        text.setLength(0);
        Guide.subscribe(session.start(Scripted.request("async", 50).build()), text)
            .get(60, TimeUnit.SECONDS);
        assertEquals(Scripted.continuation("async", 50), text.toString());
      }
    }
  }

  @Test
  void itsTakeOverWorks() throws Exception {
    var settings = Map.of("VORRANG_ENGINE__SCRIPTED_STEP_S", "0.005");
    try (ServerProcess server = ServerProcess.start(settings);
        VorrangClient first = VorrangClient.builder().target(server.address).build();
        VorrangClient second = VorrangClient.builder().target(server.address).build()) {
      Session session = first.openSession();
      GenerationStream stream = session.start(Scripted.request("taken over", 200).build());
      var text = new StringBuilder();
      Iterator<Event> events = stream.iterator();
      while (text.length() < 10) {
        if (events.next() instanceof Event.Delta delta) {
          text.append(delta.text());
        }
      }
      GenerationStream again =
          Guide.takeOver(
              second, session.info().token(), stream.requestId(), stream.consumedSequence());
      for (Event event : again) {
        if (event instanceof Event.Delta delta) {
          assertEquals(text.length(), delta.firstTokenIndex());
          text.append(delta.text());
        }
      }
      assertEquals(Scripted.continuation("taken over", 200), text.toString());
    }
  }

  @Test
  void itsErrorsAreTold() throws Exception {
    var settings =
        Map.of(
            "VORRANG_SCHEDULER__MAX_RUNNING_REQUESTS", "1",
            "VORRANG_SCHEDULER__MAX_WAITING_REQUESTS", "1",
            "VORRANG_ENGINE__SCRIPTED_STEP_S", "0.005");
    try (ServerProcess server = ServerProcess.start(settings);
        VorrangClient client = VorrangClient.builder().target(server.address).build();
        Session session = client.openSession()) {
      assertEquals("fine", Guide.errors(() -> client.generate(Scripted.request("x", 2).build())));
      var cold = Request.text("x").temperature(-1).build();
      String said = Guide.errors(() -> client.generate(cold));
      assertTrue(said.startsWith("sampling.temperature must be"), said);
      var empty = Request.text("").build();
      assertTrue(Guide.errors(() -> client.generate(empty)).endsWith("(EMPTY_PROMPT)"));
      var running = Probe.on(session.start(Scripted.request("runs", 1900).build()), Long.MAX_VALUE);
      Probe.await("a token", () -> running.tokens() > 0);
      var waiting = Probe.on(session.start(Scripted.request("waits", 5).build()), Long.MAX_VALUE);
      Probe.await("its acceptance", () -> !waiting.events.isEmpty());
      said = Guide.errors(() -> session.start(Scripted.request("refused", 5).build()).result());
      assertTrue(said.startsWith("try again in PT"), said);
      server.kill();
      server.awaitEnd();
      said = Guide.errors(() -> client.generate(Scripted.request("late", 5).build()));
      assertEquals("the server was not found again", said);
    }
  }

  private String written() {
    String text = bytes.toString(StandardCharsets.UTF_8);
    bytes.reset();
    return text;
  }
}
