package io.vorrang.client;

import io.vorrang.v1.Limits;

/**
 * What the server said when the session was opened.
 *
 * @param token names the session when it must be resumed; empty = resuming is not offered
 * @param limits what the server accepts
 * @param defaultLevel level of starts that carry no priority
 * @param policy scheduling policy in force: "priority", "fcfs", ...
 * @param serverVersion version of the server program
 */
public record SessionInfo(
    String token, Limits limits, int defaultLevel, String policy, String serverVersion) {}
