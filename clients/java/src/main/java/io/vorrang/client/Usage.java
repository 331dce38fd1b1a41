package io.vorrang.client;

import java.time.Duration;

/**
 * What a request has cost.
 *
 * @param promptTokens tokens of the prompt
 * @param cachedTokens prompt tokens whose KV was in the prefix cache at first admission
 * @param outputTokens tokens produced
 * @param recomputedTokens tokens computed again after preemptions
 * @param preemptions how often it was preempted
 * @param queued waiting before the first admission
 * @param prefill from first admission to the first output token, less preempted and parked time
 * @param decode from the first output token to the end, less preempted and parked time
 * @param preempted waiting after preemptions
 * @param parked paused, or without credit
 */
public record Usage(
    int promptTokens,
    int cachedTokens,
    int outputTokens,
    int recomputedTokens,
    int preemptions,
    Duration queued,
    Duration prefill,
    Duration decode,
    Duration preempted,
    Duration parked) {}
