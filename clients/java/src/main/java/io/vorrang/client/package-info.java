/**
 * A client of Vorrang servers: sessions that carry many requests on one stream, single calls, and
 * live control of what runs.
 *
 * <p>Start with {@link io.vorrang.client.VorrangClient}. The package knows the wire alone: nothing of
 * how the server schedules. The generated messages are in {@code io.vorrang.v1}.
 */
package io.vorrang.client;
