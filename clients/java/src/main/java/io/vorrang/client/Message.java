package io.vorrang.client;

/**
 * One message of a conversation.
 *
 * @param role who speaks: "system", "user", "assistant", or what else the model's template knows
 * @param content the text
 */
public record Message(String role, String content) {
  /** What the model is told about its task. */
  public static Message system(String content) {
    return new Message("system", content);
  }

  /** What the user says. */
  public static Message user(String content) {
    return new Message("user", content);
  }

  /** What the model said. */
  public static Message assistant(String content) {
    return new Message("assistant", content);
  }
}
