package io.vorrang.client;

import io.grpc.ManagedChannel;
import io.vorrang.v1.GenerationServiceGrpc;
import io.vorrang.v1.GenerationServiceGrpc.GenerationServiceStub;
import java.time.Duration;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.Executor;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.RejectedExecutionException;
import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.ThreadFactory;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.concurrent.atomic.AtomicInteger;

/** The channel, the threads and what is open on them: what all calls of one client share. */
final class Transport {
  private static final Duration CLOSE_TIMEOUT = Duration.ofSeconds(5);

  private final ManagedChannel channel;
  private final ExecutorService executor;
  private final ScheduledExecutorService timer;
  private final Map<Object, Runnable> open = new ConcurrentHashMap<>();
  private final AtomicBoolean closed = new AtomicBoolean();

  Transport(ManagedChannel channel, ExecutorService executor) {
    this.channel = channel;
    this.executor = executor;
    this.timer = Executors.newSingleThreadScheduledExecutor(threads("vorrang-timer"));
  }

  /** Threads that come and go with the work: a reader that blocks holds up nobody else. */
  static ExecutorService newExecutor() {
    return Executors.newCachedThreadPool(threads("vorrang-client"));
  }

  ManagedChannel channel() {
    return channel;
  }

  GenerationServiceStub stub() {
    return GenerationServiceGrpc.newStub(channel);
  }

  Executor executor() {
    return executor;
  }

  /** Runs it on a thread of the executor; on this one once the client is closed. */
  void execute(Runnable work) {
    try {
      executor.execute(work);
    } catch (RejectedExecutionException isClosed) {
      work.run();
    }
  }

  /** Runs it on the executor after a while, unless the client is closed by then. */
  void later(Runnable work, Duration delay) {
    try {
      timer.schedule(() -> execute(work), delay.toNanos(), TimeUnit.NANOSECONDS);
    } catch (RejectedExecutionException isClosed) {
      return; // whoever waits for it was closed with the client
    }
  }

  void resetConnectBackoff() {
    channel.resetConnectBackoff();
  }

  /** Has it closed with the client, in the way given. */
  void remember(Object opened, Runnable close) {
    open.put(opened, close);
    if (closed.get()) {
      forget(opened);
      throw new IllegalStateException("the client is closed");
    }
  }

  void forget(Object opened) {
    open.remove(opened);
  }

  /** Number of sessions and calls that are open. */
  int numOpen() {
    return open.size();
  }

  /** Closes all that is open, the channel and the threads. Waits a few seconds at most. */
  void close() {
    if (closed.getAndSet(true)) {
      return;
    }
    // Each may wait for the server, so they are closed side by side.
    var closings =
        open.values().stream().map(close -> CompletableFuture.runAsync(close, executor));
    CompletableFuture.allOf(closings.toArray(CompletableFuture<?>[]::new)).join();
    timer.shutdownNow();
    channel.shutdown();
    try {
      if (!channel.awaitTermination(CLOSE_TIMEOUT.toMillis(), TimeUnit.MILLISECONDS)) {
        channel.shutdownNow().awaitTermination(CLOSE_TIMEOUT.toMillis(), TimeUnit.MILLISECONDS);
      }
    } catch (InterruptedException interruption) {
      channel.shutdownNow();
      Thread.currentThread().interrupt();
    }
    executor.shutdown();
  }

  private static ThreadFactory threads(String name) {
    var number = new AtomicInteger();
    return work -> {
      var thread = new Thread(work, name + "-" + number.incrementAndGet());
      thread.setDaemon(true);
      return thread;
    };
  }
}
