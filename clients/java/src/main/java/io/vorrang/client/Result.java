package io.vorrang.client;

import java.util.List;

/**
 * The whole output of a request.
 *
 * @param text the text
 * @param tokenIds the token ids
 * @param accepted what the server accepted: level, seed
 * @param finished why it ended, and what it cost
 */
public record Result(
    String text, List<Integer> tokenIds, Event.Accepted accepted, Event.Finished finished) {
  /** Why it ended. */
  public FinishReason finishReason() {
    return finished.reason();
  }

  /** What it cost. */
  public Usage usage() {
    return finished.usage();
  }
}
