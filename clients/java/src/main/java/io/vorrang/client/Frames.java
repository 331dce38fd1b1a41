package io.vorrang.client;

import io.vorrang.v1.CancelCommand;
import io.vorrang.v1.CreditCommand;
import io.vorrang.v1.OpenCommand;
import io.vorrang.v1.PauseCommand;
import io.vorrang.v1.ReprioritizeCommand;
import io.vorrang.v1.ResumeCommand;
import io.vorrang.v1.SessionRequest;
import io.vorrang.v1.StartCommand;
import io.vorrang.v1.UnpauseCommand;

/** Frames from client to server. */
final class Frames {
  /** Revision of the protocol this client was built for. */
  private static final int REVISION = 1;

  private Frames() {}

  static SessionRequest open(SessionOptions options, String resumeToken) {
    var open =
        OpenCommand.newBuilder()
            .setClientName(options.clientName())
            .setRevision(REVISION)
            .setResumeSessionToken(resumeToken);
    options.defaultPriority().ifPresent(priority -> open.setDefaultPriority(priority.toWire()));
    return SessionRequest.newBuilder().setOpen(open).build();
  }

  static SessionRequest start(String requestId, Request request, int creditTokens) {
    var spec = request.spec().toBuilder().setCreditTokens(creditTokens);
    var start = StartCommand.newBuilder().setRequestId(requestId).setSpec(spec);
    return SessionRequest.newBuilder().setStart(start).build();
  }

  static SessionRequest cancel(String requestId) {
    var cancel = CancelCommand.newBuilder().setRequestId(requestId);
    return SessionRequest.newBuilder().setCancel(cancel).build();
  }

  static SessionRequest reprioritize(String requestId, Priority priority) {
    var command =
        ReprioritizeCommand.newBuilder().setRequestId(requestId).setPriority(priority.toWire());
    return SessionRequest.newBuilder().setReprioritize(command).build();
  }

  /** Grants tokens; says what was kept, unless that is nothing yet. */
  static SessionRequest credit(String requestId, int tokens, long acknowledgedSequence) {
    var credit = CreditCommand.newBuilder().setRequestId(requestId).setTokens(tokens);
    if (acknowledgedSequence > 0) {
      credit.setAcknowledgedSequence(acknowledgedSequence);
    }
    return SessionRequest.newBuilder().setCredit(credit).build();
  }

  static SessionRequest pause(String requestId, boolean paused) {
    var frame = SessionRequest.newBuilder();
    return paused
        ? frame.setPause(PauseCommand.newBuilder().setRequestId(requestId)).build()
        : frame.setUnpause(UnpauseCommand.newBuilder().setRequestId(requestId)).build();
  }

  static SessionRequest resume(String requestId, long afterSequence) {
    var resume = ResumeCommand.newBuilder().setRequestId(requestId).setAfterSequence(afterSequence);
    return SessionRequest.newBuilder().setResume(resume).build();
  }
}
