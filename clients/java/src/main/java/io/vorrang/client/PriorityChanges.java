package io.vorrang.client;

import io.vorrang.v1.SessionRequest;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.function.Consumer;

/**
 * Changes of priority that wait for the server's answer; it answers those of one request in order.
 * Not thread-safe. It completes nothing itself: that may run code of the caller's, so it is handed to
 * {@code later}.
 *
 * <p>A change that was lost with its stream is said again on the next one, for nobody can know whether
 * the server had heard it. So a request may be answered once more than was asked; an answer that can't
 * belong to the oldest change is passed over then.
 */
final class PriorityChanges {
  private static final class Pending {
    private final Priority asked;
    private final CompletableFuture<Event.PriorityChanged> answer;
    private boolean wasRepeated;

    private Pending(Priority asked, CompletableFuture<Event.PriorityChanged> answer) {
      this.asked = asked;
      this.answer = answer;
    }

    private boolean mayBecome(Event.PriorityChanged change) {
      return change.capped() || asked.mayBecome(change.level());
    }
  }

  private final Map<String, ArrayDeque<Pending>> waiting = new HashMap<>();
  /** By request: how many answers may still come to what was said on streams that are lost. */
  private final Map<String, Integer> strays = new HashMap<>();
  private final Consumer<Runnable> later;

  PriorityChanges(Consumer<Runnable> later) {
    this.later = later;
  }

  void add(String requestId, Priority asked, CompletableFuture<Event.PriorityChanged> answer) {
    waiting.computeIfAbsent(requestId, id -> new ArrayDeque<>()).add(new Pending(asked, answer));
  }

  /** The priority has changed; nobody may have asked for it here, for operators can do so, too. */
  void answered(String requestId, Event.PriorityChanged change) {
    var oldest = oldest(requestId);
    int numStrays = strays.getOrDefault(requestId, 0);
    if (numStrays > 0 && (oldest == null || !oldest.mayBecome(change))) {
      strays.put(requestId, numStrays - 1);
    } else if (oldest != null) {
      remove(requestId);
      later.accept(() -> oldest.answer.complete(change));
    }
  }

  /**
   * The server did not obey.
   *
   * @param isAlive whether the request's end is still to come: then the answer to what was said before
   *     a loss may come before it, although what was said again was too late
   */
  void rejected(String requestId, VorrangException error, boolean isAlive) {
    var oldest = oldest(requestId);
    if (oldest == null) {
      return;
    }
    if (oldest.wasRepeated && isAlive && error.reason() == Reason.UNKNOWN_REQUEST) {
      return;
    }
    remove(requestId);
    later.accept(() -> oldest.answer.completeExceptionally(error));
  }

  /** The request has ended. */
  void failAll(String requestId, VorrangException error) {
    strays.remove(requestId);
    var given = waiting.remove(requestId);
    if (given != null) {
      later.accept(() -> given.forEach(each -> each.answer.completeExceptionally(error)));
    }
  }

  /** Nothing will be answered any more. */
  void failAll(VorrangException error) {
    List.copyOf(waiting.keySet()).forEach(requestId -> failAll(requestId, error));
  }

  /** What has to be said on a new stream; what nobody waits for any more is not. */
  List<SessionRequest> repeat() {
    var frames = new ArrayList<SessionRequest>();
    for (var each : waiting.entrySet()) {
      strays.merge(each.getKey(), each.getValue().size(), Integer::sum);
      each.getValue().removeIf(pending -> pending.answer.isDone());
      for (Pending pending : each.getValue()) {
        pending.wasRepeated = true;
        frames.add(Frames.reprioritize(each.getKey(), pending.asked));
      }
    }
    waiting.values().removeIf(ArrayDeque::isEmpty);
    return frames;
  }

  private Pending oldest(String requestId) {
    var pending = waiting.get(requestId);
    return pending == null ? null : pending.peek();
  }

  private void remove(String requestId) {
    var pending = waiting.get(requestId);
    pending.remove();
    if (pending.isEmpty()) {
      waiting.remove(requestId);
    }
  }
}
