package io.vorrang.client;

import io.vorrang.v1.SessionRequest;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Executor;

/**
 * A request of a {@link Session}: its events, and the commands that steer it.
 *
 * <p>It outlives a broken connection: the session takes it up again where it stopped, and the reader
 * sees neither gap nor repetition.
 */
public final class GenerationStream extends EventStream {
  private final SessionCore session;

  // For the session's core alone, guarded by its lock.
  final SessionRequest startFrame; // null when it was taken up from an earlier session
  final int windowTokens;
  long lastSequence;
  long consumedSequence;
  int waitingTokens;
  int outstandingTokens;
  boolean pauseWasSaid;
  boolean paused;
  boolean cancelled;

  GenerationStream(
      SessionCore session,
      String requestId,
      SessionRequest startFrame,
      int windowTokens,
      long lastSequence,
      Executor executor) {
    super(requestId, executor);
    this.session = session;
    this.startFrame = startFrame;
    this.windowTokens = windowTokens;
    this.lastSequence = lastSequence;
    this.consumedSequence = lastSequence;
  }

  @Override
  public void cancel() {
    session.cancel(this);
  }

  /**
   * Changes the priority of the request, queued or running. It outlives the loss of the connection: it
   * is said again on the next stream of the session.
   *
   * @return completed with what is in force now; or failed with {@link CommandRejectedException} when
   *     the server did not obey, or {@link VorrangException} when the request or the session ended.
   *     What is cancelled, or times out, before its answer is not said again
   */
  public CompletableFuture<Event.PriorityChanged> reprioritize(Priority priority) {
    return session.reprioritize(this, priority);
  }

  /**
   * Stops computing the request until {@link #unpause}; it keeps its place and what it has produced.
   *
   * @throws VorrangException the session takes no more commands
   */
  public void pause() {
    session.pause(this, true);
  }

  /**
   * Lets a paused request go on.
   *
   * @throws VorrangException the session takes no more commands
   */
  public void unpause() {
    session.pause(this, false);
  }

  /**
   * Sequence of the last event that was read; 0 before the first. With {@link Session#info}'s token it
   * is what another session needs to take the request up, see {@link Session#resume}.
   */
  public long consumedSequence() {
    return session.consumedSequence(this);
  }

  @Override
  void consumed(Slot slot) {
    session.consumed(this, slot);
  }

  /** Whether the server should be granted more: half of the window is used up. */
  boolean wantsCredit() {
    return outstandingTokens <= windowTokens / 2;
  }

  /** The frame that fills its window up again. */
  SessionRequest grant() {
    int tokens = windowTokens - outstandingTokens;
    outstandingTokens = windowTokens;
    return Frames.credit(requestId(), tokens, consumedSequence);
  }
}
