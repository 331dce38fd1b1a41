package io.vorrang.client;

import java.util.ArrayDeque;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.function.Consumer;

/**
 * Changes of priority that wait for the server's answer; it answers those of one request in order.
 * Not thread-safe. It completes nothing itself: that may run code of the caller's, so it is handed to
 * {@code later}.
 */
final class PriorityChanges {
  private record Pending(Priority asked, CompletableFuture<Event.PriorityChanged> answer) {}

  private final Map<String, ArrayDeque<Pending>> waiting = new HashMap<>();
  /** By request: how many answers may still come, after a reconnection, to what was given up. */
  private final Map<String, Integer> strays = new HashMap<>();
  private final Consumer<Runnable> later;

  PriorityChanges(Consumer<Runnable> later) {
    this.later = later;
  }

  void add(String requestId, Priority asked, CompletableFuture<Event.PriorityChanged> answer) {
    waiting.computeIfAbsent(requestId, id -> new ArrayDeque<>()).add(new Pending(asked, answer));
  }

  void answered(String requestId, Event.PriorityChanged change) {
    var pending = waiting.get(requestId);
    if (pending != null && !pending.isEmpty() && isStray(requestId, pending.peek(), change)) {
      return;
    }
    var answer = next(requestId);
    if (answer != null) { // without one an operator changed it
      later.accept(() -> answer.complete(change));
    }
  }

  void rejected(String requestId, VorrangException error) {
    var answer = next(requestId);
    if (answer != null) {
      later.accept(() -> answer.completeExceptionally(error));
    }
  }

  /** The request has ended. */
  void failAll(String requestId, VorrangException error) {
    strays.remove(requestId);
    fail(waiting.remove(requestId), error);
  }

  /** The stream is lost: whether the server obeyed, or will answer on the next one, is not known. */
  void failAll(VorrangException error) {
    for (String requestId : List.copyOf(waiting.keySet())) {
      var given = waiting.remove(requestId);
      strays.merge(requestId, given.size(), Integer::sum);
      fail(given, error);
    }
  }

  private void fail(ArrayDeque<Pending> given, VorrangException error) {
    if (given != null) {
      later.accept(() -> given.forEach(each -> each.answer.completeExceptionally(error)));
    }
  }

  /** Whether the change answers one that was given up, and not the oldest that waits. */
  private boolean isStray(String requestId, Pending oldest, Event.PriorityChanged change) {
    int left = strays.getOrDefault(requestId, 0);
    boolean isAnother = !change.capped() && !oldest.asked.mayBecome(change.level());
    if (left == 0 || !isAnother) {
      return false;
    }
    strays.put(requestId, left - 1);
    return true;
  }

  private CompletableFuture<Event.PriorityChanged> next(String requestId) {
    var answers = waiting.get(requestId);
    return answers == null || answers.isEmpty() ? null : answers.poll().answer;
  }
}
