package io.vorrang.client;

/** Why a running request lost its seat and blocks. */
public enum PreemptReason {
  /** A more urgent request needed the seat. */
  SEATS,
  /** A more urgent request needed the blocks. */
  BLOCKS,
  /** A running request grew and no block was free. */
  GROWTH,
  /** An operator took it back. */
  OPERATOR,
  /** What computes died or failed, and its KV is lost. */
  RUNNER,
  /** A newer server gave a reason this client does not know. */
  UNKNOWN
}
