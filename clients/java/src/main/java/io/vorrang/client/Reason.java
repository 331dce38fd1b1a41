package io.vorrang.client;

/** Machine-readable cause of an error, as in {@code io.vorrang.v1.ErrorReason}. */
public enum Reason {
  /** There is none: the error is the transport's, or this client's own; the code says more. */
  NONE,
  /** A newer server gave one this client does not know. */
  UNKNOWN,
  /** A field breaks a rule; see {@link VorrangException#violations}. */
  INVALID_REQUEST,
  /** The prompt holds no token. */
  EMPTY_PROMPT,
  /** Prompt, or prompt and output, is longer than the model's context. */
  CONTEXT_EXCEEDED,
  /** The prompt can never fit the server's KV pool. */
  POOL_EXCEEDED,
  /** The call's metadata is malformed, repeated or out of range. */
  INVALID_METADATA,
  /** A frame could not be decoded or carries no known command. */
  MALFORMED_FRAME,
  /** No such model is served. */
  UNKNOWN_MODEL,
  /** No request of that id is alive for this caller. */
  UNKNOWN_REQUEST,
  /** The id is in use, or was a short while ago, for another request. */
  DUPLICATE_REQUEST_ID,
  /** The session takes no such command now: it is closed, or another stream has taken it up. */
  SESSION_STATE,
  /** The queue is full; see {@link VorrangException#retryAfter}. */
  QUEUE_FULL,
  /** The tenant's own quota is used up; see {@link VorrangException#retryAfter}. */
  TENANT_QUOTA_EXCEEDED,
  /** The goals of the request's class can't be met now. */
  SLO_UNATTAINABLE,
  /** The session holds as many requests as it may, or asks too often. */
  SESSION_LIMIT,
  /** The peer has as many calls open, or begins them as fast, as it may; see {@link VorrangException#retryAfter}. */
  CALL_LIMIT,
  /** The output was read too slowly for longer than it may. */
  SLOW_CONSUMER,
  /** The server is shutting down. */
  DRAINING,
  /** The engine is starting. */
  ENGINE_RESTARTING,
  /** A more urgent newcomer took this queued request's place. */
  DISPLACED,
  /** The request was preempted more often than the server allows. */
  PREEMPTION_LIMIT,
  /** The call's time ran out. */
  DEADLINE_EXCEEDED,
  /** The call was cancelled. */
  CANCELLED,
  /** No or bad credentials. */
  UNAUTHENTICATED,
  /** The identity may not do this. */
  PERMISSION_DENIED,
  /** The point to resume from is no longer held. */
  RESUME_OUT_OF_RANGE,
  /** This server version does not have the feature; the message names it. */
  UNIMPLEMENTED,
  /** A fault of the server; the message holds an incident id for its log. */
  INTERNAL
}
