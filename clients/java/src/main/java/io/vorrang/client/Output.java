package io.vorrang.client;

import java.util.List;

/**
 * One output of a request.
 *
 * @param text the text
 * @param tokenIds the token ids
 * @param logprobs one entry per token, if asked for
 * @param finished why it ended, and what it cost by itself; of an only output, and of one whose end was
 *     read elsewhere, the request's
 */
public record Output(
    String text,
    List<Integer> tokenIds,
    List<Event.PositionLogprobs> logprobs,
    Event.Finished finished) {}
