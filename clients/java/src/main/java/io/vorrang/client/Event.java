package io.vorrang.client;

import java.util.List;
import java.util.OptionalInt;

/**
 * What a request tells its caller. {@link Finished} is always the last; a failure is no event but an
 * {@link VorrangException}. An event of a kind a newer server adds is passed over.
 */
public sealed interface Event {
  /**
   * The request is valid and queued.
   *
   * @param level level in force; lower is more urgent
   * @param capped whether the tenant's cap made it less urgent than asked for
   * @param requestedLevel level that was asked for
   * @param queuePosition requests that wait and would be served before it
   * @param priorityIgnored whether the policy in force does not look at priority
   * @param promptTokens tokens of the prompt
   * @param seed seed in force, to produce the same output again; unsigned
   */
  record Accepted(
      int level,
      boolean capped,
      int requestedLevel,
      int queuePosition,
      boolean priorityIgnored,
      int promptTokens,
      long seed)
      implements Event {}

  /**
   * Its place in the queue has changed.
   *
   * @param queuePosition requests that wait and would be served before it
   */
  record QueueUpdate(int queuePosition) implements Event {}

  /**
   * It has a seat and is being computed for the first time.
   *
   * @param promptTokens tokens of the prompt
   * @param cachedTokens of these, found in the prefix cache
   * @param outputIndex which of several outputs it is, from 0
   */
  record Started(int promptTokens, int cachedTokens, int outputIndex) implements Event {}

  /**
   * Log probabilities of tokens of the prompt, if asked for: before the first output, each token once,
   * and in pieces when the prompt is computed in pieces. The first token has none.
   *
   * @param firstTokenIndex index of the first of them in the prompt, from 1
   * @param positions one entry per token
   */
  record PromptLogprobs(int firstTokenIndex, List<PositionLogprobs> positions) implements Event {}

  /**
   * New output: never cumulative, never repeated; several tokens when the reader lags.
   *
   * @param text new text; it may lag behind the ids while a character or a possible stop string is
   *     incomplete
   * @param tokenIds new token ids
   * @param firstTokenIndex index of the first of them in the output, from 0
   * @param logprobs one entry per token, if asked for
   * @param outputIndex which of several outputs it belongs to, from 0
   */
  record Delta(
      String text,
      List<Integer> tokenIds,
      int firstTokenIndex,
      List<PositionLogprobs> logprobs,
      int outputIndex)
      implements Event {}

  /**
   * A token and the natural logarithm of its probability.
   *
   * @param tokenId the token
   * @param logprob natural logarithm of its probability
   */
  record TokenLogprob(int tokenId, float logprob) {}

  /**
   * Log probabilities at one position of an output or the prompt.
   *
   * @param sampled the token that stands there
   * @param top the likeliest tokens, likeliest first
   */
  record PositionLogprobs(TokenLogprob sampled, List<TokenLogprob> top) {}

  /**
   * It lost its seat to a more urgent request; the output goes on later without a gap.
   *
   * @param reason what was needed
   * @param count how often it has been preempted, this time included
   * @param outputIndex which of several outputs it is, from 0
   */
  record Preempted(PreemptReason reason, int count, int outputIndex) implements Event {}

  /**
   * It is being computed again after a preemption.
   *
   * @param recomputedTokens tokens that must be computed again
   * @param outputIndex which of several outputs it is, from 0
   */
  record Resumed(int recomputedTokens, int outputIndex) implements Event {}

  /**
   * Its priority has changed.
   *
   * @param level level in force
   * @param capped whether the tenant's cap made it less urgent than asked for
   * @param priorityIgnored whether the policy in force does not look at priority
   */
  record PriorityChanged(int level, boolean capped, boolean priorityIgnored) implements Event {}

  /**
   * One of several outputs has ended; {@link Finished} follows when all have.
   *
   * @param outputIndex which, from 0
   * @param finished why, and what it cost by itself
   */
  record OutputFinished(int outputIndex, Finished finished) implements Event {}

  /**
   * It ended with an output, or with all of several.
   *
   * @param reason why it ended
   * @param usage what it cost
   * @param stopString the stop string that ended it; empty when none did
   * @param stopTokenId the stop token that ended it, if one did
   */
  record Finished(FinishReason reason, Usage usage, String stopString, OptionalInt stopTokenId)
      implements Event {}
}
