package io.vorrang.client;

import java.util.List;

/**
 * All that became of a request.
 *
 * @param outputs its outputs in order; one, unless more were asked for
 * @param promptLogprobs one entry per token of the prompt but the first, if asked for
 * @param accepted what the server accepted: level, seed
 * @param finished why it ended, and what it cost: all outputs together
 */
public record Result(
    List<Output> outputs,
    List<Event.PositionLogprobs> promptLogprobs,
    Event.Accepted accepted,
    Event.Finished finished) {
  /** The text; of several outputs the first one's. */
  public String text() {
    return outputs.get(0).text();
  }

  /** The token ids; of several outputs the first one's. */
  public List<Integer> tokenIds() {
    return outputs.get(0).tokenIds();
  }

  /** Log probabilities of its tokens, if asked for; of several outputs the first one's. */
  public List<Event.PositionLogprobs> logprobs() {
    return outputs.get(0).logprobs();
  }

  /** Why it ended. */
  public FinishReason finishReason() {
    return finished.reason();
  }

  /** What it cost. */
  public Usage usage() {
    return finished.usage();
  }
}
