package io.vorrang.client;

import io.vorrang.v1.ChatMessage;
import io.vorrang.v1.ChatPrompt;
import io.vorrang.v1.Choice;
import io.vorrang.v1.GenerationSpec;
import io.vorrang.v1.Grammar;
import io.vorrang.v1.Prompt;
import io.vorrang.v1.SamplingParams;
import io.vorrang.v1.TokenIds;
import java.time.Duration;
import java.util.List;
import java.util.Objects;
import java.util.OptionalInt;
import java.util.function.Consumer;

/**
 * What is to be generated, and how. Immutable; what is not set is left to the server.
 *
 * <p>The server checks every value and names the field that breaks a rule, so nothing is checked
 * here. What has no method of its own is set with {@link Builder#sampling} or {@link Builder#spec}.
 */
public final class Request {
  private final String id;
  private final GenerationSpec spec;

  private Request(Builder builder) {
    id = builder.id;
    spec = builder.spec.build();
  }

  /** A request that continues a text. */
  public static Builder text(String prompt) {
    return new Builder(Prompt.newBuilder().setText(prompt).build());
  }

  /** A request that continues a conversation, by the model's own chat template. */
  public static Builder chat(List<Message> messages) {
    var chat = ChatPrompt.newBuilder();
    for (Message message : messages) {
      chat.addMessages(
          ChatMessage.newBuilder().setRole(message.role()).setContent(message.content()));
    }
    return new Builder(Prompt.newBuilder().setChat(chat).build());
  }

  /** A request that continues a conversation, by the model's own chat template. */
  public static Builder chat(Message... messages) {
    return chat(List.of(messages));
  }

  /** A request that continues tokens, taken as they are. */
  public static Builder tokens(List<Integer> tokenIds) {
    return new Builder(
        Prompt.newBuilder().setTokens(TokenIds.newBuilder().addAllIds(tokenIds)).build());
  }

  /** The id; empty = made by the client in a session, by the server elsewhere. */
  public String id() {
    return id;
  }

  /** The request as it goes over the wire. */
  public GenerationSpec spec() {
    return spec;
  }

  /** Output tokens the server may send before more are granted; empty = the session's window. */
  public OptionalInt creditTokens() {
    return spec.hasCreditTokens() ? OptionalInt.of(spec.getCreditTokens()) : OptionalInt.empty();
  }

  /** Makes a {@link Request}. */
  public static final class Builder {
    private final GenerationSpec.Builder spec = GenerationSpec.newBuilder();
    private String id = "";

    private Builder(Prompt prompt) {
      spec.setPrompt(prompt);
    }

    /** Its id: unique in the tenant, 1..128 bytes of printable ASCII. */
    public Builder id(String requestId) {
      id = Objects.requireNonNull(requestId);
      return this;
    }

    /** How urgent it is. */
    public Builder priority(Priority priority) {
      spec.setPriority(priority.toWire());
      return this;
    }

    /** Most output tokens, at least 1. */
    public Builder maxTokens(int maxTokens) {
      return sampling(s -> s.setMaxTokens(maxTokens));
    }

    /** Softmax temperature, 0..10; 0 = greedy. */
    public Builder temperature(double temperature) {
      return sampling(s -> s.setTemperature((float) temperature));
    }

    /** Keep the k likeliest tokens; 0 = all. */
    public Builder topK(int topK) {
      return sampling(s -> s.setTopK(topK));
    }

    /** Keep the smallest set of likeliest tokens whose probability reaches this, 0 &lt; p &lt;= 1. */
    public Builder topP(double topP) {
      return sampling(s -> s.setTopP((float) topP));
    }

    /** Seed of the sampling noise. */
    public Builder seed(long seed) {
      return sampling(s -> s.setSeed(seed));
    }

    /** Strings that end the output. */
    public Builder stop(String... stopStrings) {
      return sampling(s -> s.addAllStopStrings(List.of(stopStrings)));
    }

    /** Tell each token's log probability, and those of so many likeliest tokens beside it. */
    public Builder logprobs(int topTokens) {
      return sampling(s -> s.setLogprobs(topTokens));
    }

    /** The same for the tokens of the prompt; see {@link Result#promptLogprobs}. */
    public Builder promptLogprobs(int topTokens) {
      return sampling(s -> s.setPromptLogprobs(topTokens));
    }

    /** Any other sampling parameter, as the wire names it. */
    public Builder sampling(Consumer<SamplingParams.Builder> change) {
      change.accept(spec.getSamplingBuilder());
      return this;
    }

    /**
     * Number of outputs, each with a seed of its own, at least 1; more than one need a temperature
     * above 0. See {@link Result#outputs}, and {@code outputIndex} of the events.
     */
    public Builder outputs(int count) {
      spec.setNumOutputs(count);
      return this;
    }

    /**
     * Have the output obey a JSON schema, which is given as JSON. Of this, {@link #regex}, {@link #ebnf}
     * and {@link #choice} the last one counts.
     */
    public Builder jsonSchema(String schema) {
      return grammar(g -> g.setJsonSchema(schema));
    }

    /** Have the whole output match a regular expression. */
    public Builder regex(String expression) {
      return grammar(g -> g.setRegex(expression));
    }

    /** Have the output obey a grammar in EBNF, in the form of GBNF; it begins with the rule {@code root}. */
    public Builder ebnf(String grammar) {
      return grammar(g -> g.setEbnf(grammar));
    }

    /** Have the output be one of several answers. */
    public Builder choice(List<String> answers) {
      return grammar(g -> g.setChoice(Choice.newBuilder().addAllOptions(answers)));
    }

    /** Have the output be one of several answers. */
    public Builder choice(String... answers) {
      return choice(List.of(answers));
    }

    private Builder grammar(Consumer<Grammar.Builder> change) {
      change.accept(spec.getGrammarBuilder());
      return this;
    }

    /** Longest time in the queue before the first token is computed. */
    public Builder queueTimeout(Duration timeout) {
      spec.setQueueTimeout(Wire.duration(timeout));
      return this;
    }

    /** Longest time from arrival to the last token; what was produced until then stands. */
    public Builder totalTimeout(Duration timeout) {
      spec.setTotalTimeout(Wire.duration(timeout));
      return this;
    }

    /**
     * Output tokens the server may send before more are granted, at least 1; for sessions alone. It
     * bounds what waits in memory for a subscriber that is slower than the model.
     */
    public Builder creditTokens(int tokens) {
      if (tokens < 1) {
        throw new IllegalArgumentException("creditTokens must be at least 1, got " + tokens);
      }
      spec.setCreditTokens(tokens);
      return this;
    }

    /** Free text for logs and dashboards, at most 128 bytes. */
    public Builder label(String label) {
      spec.setLabel(label);
      return this;
    }

    /** Name of the model. */
    public Builder model(String model) {
      spec.setModel(model);
      return this;
    }

    /** Name of a LoRA adapter of the model; {@link VorrangClient#model} lists them. */
    public Builder adapter(String adapter) {
      spec.setAdapter(adapter);
      return this;
    }

    /** Anything else of the request, as the wire names it. */
    public Builder spec(Consumer<GenerationSpec.Builder> change) {
      change.accept(spec);
      return this;
    }

    /** The request. */
    public Request build() {
      return new Request(this);
    }
  }
}
