package io.vorrang.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNotEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.vorrang.v1.Grammar;
import java.util.ArrayList;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.TimeUnit;
import java.util.stream.IntStream;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.api.extension.ExtendWith;

/** Several outputs, log probabilities and grammars, against the real server. */
@ExtendWith(SharedServer.class)
@Timeout(180)
class OutputsTest {
  private static final String PROMPT = "a prompt that is longer than a block of the pool";
  private static final int OUTPUTS = 3;
  private static final int TOKENS = 6;

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
  void everyWayOfAskingGivesTheSameOutputsWithTheirLogProbabilities() throws Exception {
    Request request = several(PROMPT).logprobs(2).promptLogprobs(1).build();
    Result unary = client.generate(request);
    check(unary);
    List<Result> others = new ArrayList<>();
    others.add(client.generateStream(request).result());
    try (Session session = client.openSession()) {
      others.add(session.start(request).result());
      others.add(session.start(request).resultAsync().get(60, TimeUnit.SECONDS));
    }
    for (Result other : others) {
      check(other);
      for (int i = 0; i < OUTPUTS; i++) {
        assertEquals(unary.outputs().get(i).text(), other.outputs().get(i).text());
        assertEquals(unary.outputs().get(i).logprobs(), other.outputs().get(i).logprobs());
      }
      assertEquals(unary.promptLogprobs(), other.promptLogprobs());
    }
  }

  private static void check(Result result) {
    assertEquals(OUTPUTS, result.outputs().size());
    Set<String> texts = new HashSet<>();
    for (Output output : result.outputs()) {
      texts.add(output.text());
      assertEquals(TOKENS, output.text().length());
      assertEquals(TOKENS, output.tokenIds().size());
      var sampled = output.logprobs().stream().map(each -> each.sampled().tokenId()).toList();
      assertEquals(output.tokenIds(), sampled);
      output.logprobs().forEach(each -> assertEquals(2, each.top().size()));
      assertEquals(FinishReason.LENGTH, output.finished().reason());
      assertEquals(TOKENS, output.finished().usage().outputTokens());
    }
    assertEquals(OUTPUTS, texts.size(), "two outputs are the same");
    assertEquals(result.outputs().get(0).text(), result.text());
    assertEquals(result.outputs().get(0).tokenIds(), result.tokenIds());
    assertEquals(result.outputs().get(0).logprobs(), result.logprobs());
    assertEquals(OUTPUTS * TOKENS, result.usage().outputTokens());
    var scored = result.promptLogprobs().stream().map(each -> each.sampled().tokenId()).toList();
    assertEquals(PROMPT.chars().skip(1).boxed().toList(), scored);
    result.promptLogprobs().forEach(each -> assertEquals(1, each.top().size()));
  }

  @Test
  void eventsSayWhichOutputTheyAreAbout() {
    try (Session session = client.openSession()) {
      var lengths = new int[OUTPUTS];
      var started = new HashSet<Integer>();
      var ended = new HashSet<Integer>();
      int scored = 0;
      for (Event event : session.start(several(PROMPT).promptLogprobs(0).build())) {
        if (event instanceof Event.Delta delta) {
          assertEquals(lengths[delta.outputIndex()], delta.firstTokenIndex());
          lengths[delta.outputIndex()] += delta.tokenIds().size();
        } else if (event instanceof Event.Started start) {
          started.add(start.outputIndex());
        } else if (event instanceof Event.OutputFinished end) {
          assertEquals(TOKENS, lengths[end.outputIndex()]);
          assertTrue(ended.add(end.outputIndex()));
        } else if (event instanceof Event.PromptLogprobs part) {
          assertEquals(1 + scored, part.firstTokenIndex());
          scored += part.positions().size();
        }
      }
      var all = Set.copyOf(IntStream.range(0, OUTPUTS).boxed().toList());
      assertEquals(all, started);
      assertEquals(all, ended);
      assertEquals(PROMPT.length() - 1, scored);
    }
  }

  @Test
  void severalOutputsSurviveALostConnection() throws Exception {
    try (var proxy = new CuttingProxy(SharedServer.port());
        var cut = VorrangClient.builder().target(proxy.address()).build();
        var session = cut.openSession()) {
      Request.Builder request = several("cut").maxTokens(300);
      var whole = client.generate(request.build()).outputs().stream().map(Output::text).toList();
      var collector = new Collector();
      int numTokens = 0;
      int cuts = 0;
      for (Event event : session.start(request.creditTokens(32).build())) {
        collector.add(event);
        if (event instanceof Event.Delta delta) {
          numTokens += delta.tokenIds().size();
          if (numTokens > 200 * (cuts + 1) && cuts < 2) {
            cuts++;
            proxy.cut();
          }
        }
      }
      assertEquals(2, cuts);
      assertEquals(whole, collector.result().outputs().stream().map(Output::text).toList());
    }
  }

  @Test
  void anOnlyOutputEndsWithItsRequest() {
    Request request = Scripted.request("only", 5).logprobs(0).build();
    for (Result result : List.of(client.generate(request), client.generateStream(request).result())) {
      assertEquals(1, result.outputs().size());
      assertEquals(result.finished(), result.outputs().get(0).finished());
      assertEquals(Scripted.continuation("only", 5), result.text());
      assertEquals(5, result.logprobs().size());
      assertEquals(List.of(), result.promptLogprobs());
    }
  }

  @Test
  void aChoiceIsObeyedAndOtherGrammarsAreRefusedByAScriptedModel() {
    String answer = client.generate(Request.text("is it?").choice("yes", "no").build()).text();
    assertTrue(Set.of("yes", "no").contains(answer), answer);
    var refused =
        Map.of(
            "grammar.regex", Request.text("x").regex("a+"),
            "grammar.json_schema", Request.text("x").jsonSchema("{\"type\": \"integer\"}"),
            "grammar.ebnf", Request.text("x").ebnf("root ::= \"a\""));
    refused.forEach(
        (field, request) -> {
          var error =
              assertThrows(VorrangException.class, () -> client.generate(request.build()));
          assertTrue(error.getMessage().contains(field), error.getMessage());
        });
  }

  @Test
  void whatIsAskedForIsOnTheWire() {
    var request = Request.text("x").regex("a+").ebnf("root ::= \"a\"");
    assertEquals(Grammar.ValueCase.EBNF, request.build().spec().getGrammar().getValueCase());
    var again = request.choice(List.of("a", "b")).outputs(2).logprobs(0).promptLogprobs(3).build();
    assertEquals(List.of("a", "b"), again.spec().getGrammar().getChoice().getOptionsList());
    assertEquals(2, again.spec().getNumOutputs());
    assertTrue(again.spec().getSampling().hasLogprobs());
    assertEquals(3, again.spec().getSampling().getPromptLogprobs());
    assertNotEquals(again.spec(), request.outputs(3).build().spec());
  }

  private static Request.Builder several(String prompt) {
    return Request.text(prompt).temperature(1).seed(9).maxTokens(TOKENS).outputs(OUTPUTS);
  }
}
