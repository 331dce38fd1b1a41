"""Certificates made on the spot, in files, for servers and clients in tests.

``python -m tests.support.certificates FOLDER`` writes a server's, those of the client ``acme`` and those of
``stranger``, whose authority nobody trusts: for tests in other languages.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import grpc
import trustme
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)


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
        self._write("server", self.ca.issue_cert(*(names or ("localhost", "127.0.0.1"))))

    def write_client(self, name: str, ca: trustme.CA | None = None) -> None:
        """Put a client's certificate, with its name as common name, into ``NAME.pem`` and ``NAME.key``."""
        self._write(name, (ca or self.ca).issue_cert(f"{name}@example.org", common_name=name))

    def _write(self, name: str, own: trustme.LeafCert) -> None:
        # Keys in PKCS#8, the one form that Java reads.
        key = load_pem_private_key(own.private_key_pem.bytes(), None)
        pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        (self.folder / f"{name}.key").write_bytes(pem)
        (self.folder / f"{name}.pem").write_bytes(b"".join(part.bytes() for part in own.cert_chain_pems))

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


if __name__ == "__main__":
    made = certificates(Path(sys.argv[1]))
    made.write_client("acme")
    others = trustme.CA()
    others.cert_pem.write_to_path(made.folder / "stranger-ca.pem")
    made.write_client("stranger", others)
