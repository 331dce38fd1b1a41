package io.vorrang.client;

import static org.junit.jupiter.api.Assertions.assertTrue;

import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CopyOnWriteArrayList;
import java.util.concurrent.Flow;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.function.BooleanSupplier;

/** A subscriber that keeps what it gets, asks for what a test tells it to, and knows the rules. */
class Probe implements Flow.Subscriber<Event> {
  final List<Event> events = new CopyOnWriteArrayList<>();
  final CompletableFuture<Void> end = new CompletableFuture<>();
  private final CompletableFuture<Flow.Subscription> subscription = new CompletableFuture<>();
  private final AtomicInteger inside = new AtomicInteger();
  private final long firstDemand;
  volatile boolean overlapped;

  Probe(long firstDemand) {
    this.firstDemand = firstDemand;
  }

  static Probe on(EventStream stream, long firstDemand) {
    var probe = new Probe(firstDemand);
    stream.subscribe(probe);
    return probe;
  }

  void request(long n) {
    subscription.join().request(n);
  }

  void cancel() {
    subscription.join().cancel();
  }

  String text() {
    var text = new StringBuilder();
    for (Event event : events) {
      if (event instanceof Event.Delta delta) {
        text.append(delta.text());
      }
    }
    return text.toString();
  }

  int tokens() {
    return events.stream()
        .mapToInt(e -> e instanceof Event.Delta delta ? delta.tokenIds().size() : 0)
        .sum();
  }

  /** The last event, once the stream has ended well. */
  Event.Finished finished() throws Exception {
    end.get(60, TimeUnit.SECONDS);
    return (Event.Finished) events.get(events.size() - 1);
  }

  /** Waits until something holds; a test that waits in vain says for what. */
  static void await(String what, BooleanSupplier holds) throws InterruptedException {
    long endNanos = System.nanoTime() + TimeUnit.SECONDS.toNanos(60);
    while (!holds.getAsBoolean()) {
      assertTrue(System.nanoTime() < endNanos, "waited in vain: " + what);
      Thread.sleep(2);
    }
  }

  @Override
  public void onSubscribe(Flow.Subscription given) {
    subscription.complete(given);
    if (firstDemand > 0) {
      given.request(firstDemand);
    }
  }

  @Override
  public void onNext(Event event) {
    overlapped |= inside.incrementAndGet() > 1;
    events.add(event);
    inside.decrementAndGet();
  }

  @Override
  public void onError(Throwable error) {
    end.completeExceptionally(error);
  }

  @Override
  public void onComplete() {
    end.complete(null);
  }
}
