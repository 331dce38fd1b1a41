package io.vorrang.client;

/**
 * How urgent a request is: a level, or the name of a class of levels.
 *
 * @param level -100..100, lower is more urgent; not looked at when there is a class name
 * @param className name of a class, or empty
 */
public record Priority(int level, String className) {
  /** Somebody waits for every token; level -10. */
  public static final Priority INTERACTIVE = ofClass("interactive");

  /** The usual one; level 0. */
  public static final Priority STANDARD = ofClass("standard");

  /** Nobody waits; level 10. */
  public static final Priority BATCH = ofClass("batch");

  /** A level, -100..100; lower is more urgent. The server checks it. */
  public static Priority level(int level) {
    return new Priority(level, "");
  }

  /** A class by its name; the server checks it. */
  public static Priority ofClass(String className) {
    return new Priority(0, className);
  }

  /** Whether the server may make this level of it, as far as is known here. */
  boolean mayBecome(int other) {
    return switch (className) {
      case "" -> level == other;
      case "interactive" -> other == -10;
      case "standard" -> other == 0;
      case "batch" -> other == 10;
      default -> true;
    };
  }

  io.vorrang.v1.Priority toWire() {
    var priority = io.vorrang.v1.Priority.newBuilder();
    return (className.isEmpty() ? priority.setLevel(level) : priority.setClassName(className)).build();
  }
}
