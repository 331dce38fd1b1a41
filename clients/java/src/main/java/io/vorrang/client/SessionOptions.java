package io.vorrang.client;

import java.time.Duration;
import java.util.Objects;
import java.util.Optional;

/** How a session behaves. Immutable. */
public final class SessionOptions {
  private final Builder values;

  private SessionOptions(Builder builder) {
    values = builder.copy();
  }

  /** Options with their defaults. */
  public static Builder builder() {
    return new Builder();
  }

  String clientName() {
    return values.clientName;
  }

  Optional<Priority> defaultPriority() {
    return Optional.ofNullable(values.defaultPriority);
  }

  int windowTokens() {
    return values.windowTokens;
  }

  Duration openTimeout() {
    return values.openTimeout;
  }

  Duration reconnectTimeout() {
    return values.reconnectTimeout;
  }

  Duration closeTimeout() {
    return values.closeTimeout;
  }

  String resumeToken() {
    return values.resumeToken;
  }

  /** Makes {@link SessionOptions}. */
  public static final class Builder {
    private String clientName = "vorrang-java";
    private Priority defaultPriority;
    private int windowTokens = 256;
    private Duration openTimeout = Duration.ofSeconds(30);
    private Duration reconnectTimeout = Duration.ofSeconds(10);
    private Duration closeTimeout = Duration.ofSeconds(5);
    private String resumeToken = "";

    private Builder() {}

    private Builder copy() {
      var copy = new Builder();
      copy.clientName = clientName;
      copy.defaultPriority = defaultPriority;
      copy.windowTokens = windowTokens;
      copy.openTimeout = openTimeout;
      copy.reconnectTimeout = reconnectTimeout;
      copy.closeTimeout = closeTimeout;
      copy.resumeToken = resumeToken;
      return copy;
    }

    /** Name and version of the calling program, for the server's logs; at most 128 bytes. */
    public Builder clientName(String name) {
      clientName = Objects.requireNonNull(name);
      return this;
    }

    /** Priority of requests that carry none; not set = the server decides. */
    public Builder defaultPriority(Priority priority) {
      defaultPriority = Objects.requireNonNull(priority);
      return this;
    }

    /**
     * Output tokens of one request that may be under way or wait for its reader, at least 1; default
     * 256. A request with a credit of its own has that instead.
     */
    public Builder windowTokens(int tokens) {
      if (tokens < 1) {
        throw new IllegalArgumentException("windowTokens must be at least 1, got " + tokens);
      }
      windowTokens = tokens;
      return this;
    }

    /** Longest wait for the server's answer to the opening; default 30 s. */
    public Builder openTimeout(Duration timeout) {
      openTimeout = notNegative("openTimeout", timeout);
      return this;
    }

    /**
     * How long a lost connection is tried again before the requests fail; default 10 s, which is how
     * long servers keep them. Zero = not at all.
     */
    public Builder reconnectTimeout(Duration timeout) {
      reconnectTimeout = notNegative("reconnectTimeout", timeout);
      return this;
    }

    /** Longest wait in {@link Session#close} for the server to end what was cancelled; default 5 s. */
    public Builder closeTimeout(Duration timeout) {
      closeTimeout = notNegative("closeTimeout", timeout);
      return this;
    }

    /** Takes up an earlier session by its token; its requests wait for {@link Session#resume}. */
    public Builder resumeToken(String token) {
      resumeToken = Objects.requireNonNull(token);
      return this;
    }

    /** The options. */
    public SessionOptions build() {
      return new SessionOptions(this);
    }

    private static Duration notNegative(String name, Duration duration) {
      if (duration.isNegative()) {
        throw new IllegalArgumentException(name + " must not be negative, got " + duration);
      }
      return duration;
    }
  }
}
