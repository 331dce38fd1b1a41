package io.vorrang.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;

import io.grpc.TlsServerCredentials;
import java.nio.file.Path;
import java.util.List;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.api.io.TempDir;

/** Whom a token is shown to; {@link TenantsTest} has the rest, against the real server. */
@Timeout(180)
class SecurityTest {
  private static final Request REQUEST = Request.text("x").build();

  @Test
  void aServerThatIsNotTrustedIsNotEvenShownTheToken(@TempDir Path folder) throws Exception {
    ServerProcess.makeCertificates(folder);
    var credentials =
        TlsServerCredentials.create(
            folder.resolve("server.pem").toFile(), folder.resolve("server.key").toFile());
    try (FakeServer server = new FakeServer(credentials)) {
      var builder = VorrangClient.builder().target(server.address()).token("secret");
      try (VorrangClient client = builder.tls(folder.resolve("stranger-ca.pem").toFile()).build()) {
        assertThrows(ConnectionLostException.class, () -> client.generate(REQUEST));
        assertThrows(ConnectionLostException.class, client::openSession);
      }
      assertEquals(List.of(), server.authorizations);
      try (VorrangClient client = builder.tls(folder.resolve("ca.pem").toFile()).build()) {
        assertEquals("hello", client.generate(REQUEST).text());
      }
      assertEquals(List.of("Bearer secret"), server.authorizations);
    }
  }

  @Test
  void aTokenLeavesThisMachineEncryptedUnlessToldOtherwise() {
    for (String target : List.of("10.0.0.1:50051", "dns:///vorrang.example:443", "127.evil.example:1")) {
      var builder = VorrangClient.builder().target(target).token("secret");
      var refused = assertThrows(IllegalStateException.class, builder::build);
      assertFalse(refused.getMessage().contains("secret"));
      builder.plaintextToken(true).build().close();
    }
    for (String target : List.of("127.0.0.1:50051", "dns:///localhost:1", "[::1]:1", "unix:/tmp/x")) {
      VorrangClient.builder().target(target).token("secret").build().close();
    }
  }
}
