package io.vorrang.examples;

import io.vorrang.client.Message;
import io.vorrang.client.Priority;
import io.vorrang.client.Request;
import io.vorrang.client.VorrangClient;

public class FirstClient {
  public static void main(String[] arguments) {
    try (var client = VorrangClient.builder().target("127.0.0.1:50051").build();
        var session = client.openSession()) {
      var report = session.start(
          Request.text("Once upon a time").priority(Priority.BATCH).maxTokens(64).temperature(0).build());
      var question = session.start(
          Request.chat(Message.user("What is the capital of France?"))
              .priority(Priority.INTERACTIVE).maxTokens(16).temperature(0).build());
      System.out.println("question: " + question.text());
      var result = report.result();
      System.out.printf("report: %s (%d times preempted)%n", result.text(), result.usage().preemptions());
    }
  }
}
