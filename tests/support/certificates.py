"""Certificates made on the spot, in files, for servers and clients in tests."""

from dataclasses import dataclass
from pathlib import Path

import grpc
import trustme


@dataclass(frozen=True)
class Certificates:
    """An authority, and the files of a server's certificate that it signed."""

    ca: trustme.CA
    folder: Path

    @property
    def settings(self) -> dict[str, object]:
        """A server with TLS."""
        return {"tls.certificate": self.folder / "server.pem", "tls.private_key": self.folder / "server.key"}

    @property
    def mutual_settings(self) -> dict[str, object]:
        """A server that wants to see a client's certificate, too."""
        return {**self.settings, "tls.client_ca": self.folder / "ca.pem"}

    def write_server(self, *names: str) -> None:
        """Put a new certificate of the server in the place of the old one."""
        certificate = self.ca.issue_cert(*(names or ("localhost", "127.0.0.1")))
        certificate.private_key_pem.write_to_path(self.folder / "server.key")
        chain = b"".join(part.bytes() for part in certificate.cert_chain_pems)
        (self.folder / "server.pem").write_bytes(chain)

    def client(self, common_name: str | None = None, ca: trustme.CA | None = None) -> grpc.ChannelCredentials:
        """What a client trusts, and shows when it has a name."""
        root = self.ca.cert_pem.bytes()
        if common_name is None:
            return grpc.ssl_channel_credentials(root)
        own = (ca or self.ca).issue_cert("client@example.org", common_name=common_name)
        chain = b"".join(part.bytes() for part in own.cert_chain_pems)
        return grpc.ssl_channel_credentials(root, own.private_key_pem.bytes(), chain)


def certificates(folder: Path) -> Certificates:
    """A new authority, and a server's certificate."""
    made = Certificates(trustme.CA(), folder)
    made.ca.cert_pem.write_to_path(folder / "ca.pem")
    made.write_server()
    return made
