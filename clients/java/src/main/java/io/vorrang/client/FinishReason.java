package io.vorrang.client;

/** Why a request finished. */
public enum FinishReason {
  /** The model produced its end token. */
  STOP,
  /** A stop string appeared. */
  STOP_STRING,
  /** One of the stop tokens appeared. */
  STOP_TOKEN,
  /** The most output tokens, or the context, is reached. */
  LENGTH,
  /** The output outgrew the KV pool; what was produced stands. */
  CAPACITY,
  /** A time budget ran out; what was produced stands. */
  TIME_LIMIT,
  /** The client cancelled it. */
  CANCELLED,
  /** A newer server gave a reason this client does not know. */
  UNKNOWN
}
