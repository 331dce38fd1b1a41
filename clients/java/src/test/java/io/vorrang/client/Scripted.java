package io.vorrang.client;

import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;

/** What the server's scripted model says, worked out anew. */
final class Scripted {
  private Scripted() {}

  /** The greedy continuation of a text by {@code numTokens} tokens; each is one printable character. */
  static String continuation(String prompt, int numTokens) {
    List<Integer> ids = new ArrayList<>();
    for (byte b : prompt.getBytes(StandardCharsets.UTF_8)) {
      ids.add(b & 0xff);
    }
    var output = new StringBuilder();
    for (int i = 0; i < numTokens; i++) {
      long total = 7L * ids.size();
      for (int position = 0; position < ids.size(); position++) {
        total += (position + 1L) * ids.get(position);
      }
      int next = 32 + (int) (total % 95);
      ids.add(next);
      output.append((char) next);
    }
    return output.toString();
  }

  /** A greedy request for that continuation. */
  static Request.Builder request(String prompt, int numTokens) {
    return Request.text(prompt).temperature(0).maxTokens(numTokens);
  }
}
