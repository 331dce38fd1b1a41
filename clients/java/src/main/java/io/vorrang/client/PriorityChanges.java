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
  private final Map<String, ArrayDeque<CompletableFuture<Event.PriorityChanged>>> waiting =
      new HashMap<>();
  private final Consumer<Runnable> later;

  PriorityChanges(Consumer<Runnable> later) {
    this.later = later;
  }

  void add(String requestId, CompletableFuture<Event.PriorityChanged> answer) {
    waiting.computeIfAbsent(requestId, id -> new ArrayDeque<>()).add(answer);
  }

  void answered(String requestId, Event.PriorityChanged change) {
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

  void failAll(String requestId, VorrangException error) {
    var answers = waiting.remove(requestId);
    if (answers != null) {
      later.accept(() -> answers.forEach(answer -> answer.completeExceptionally(error)));
    }
  }

  void failAll(VorrangException error) {
    List.copyOf(waiting.keySet()).forEach(id -> failAll(id, error));
  }

  private CompletableFuture<Event.PriorityChanged> next(String requestId) {
    var answers = waiting.get(requestId);
    return answers == null ? null : answers.poll();
  }
}
