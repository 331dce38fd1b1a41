"""A hub on loopback that has one model, for tests of downloads."""

import contextlib
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "c0ffee" + "0" * 34
TAG = "v1"


class FakeHub:
    """Serves the files of ``folder`` as ``owner/name``, at the branch main, the tag v1 and a commit.

    ``asked`` holds the paths of all requests.
    """

    def __init__(self, folder: Path, repository: str) -> None:
        self.folder, self.repository = folder, repository
        self.asked: list[str] = []

    @contextlib.contextmanager
    def serving(self):
        """Its address, while it serves."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    def _answer(self, path):
        """Status, content and headers."""
        path = path.partition("?")[0]
        api, commits = f"/api/models/{self.repository}", ("main", TAG, COMMIT)
        if path in [f"{api}/revision/{revision}" for revision in commits]:
            return 200, json.dumps({"id": self.repository, "sha": COMMIT}).encode(), {}
        if path.startswith(f"{api}/revision/"):
            return 404, b"{}", {"X-Error-Code": "RevisionNotFound"}
        if path == f"{api}/tree/{COMMIT}":
            files = [
                {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": _etag(file)}
                for file in sorted(self.folder.iterdir())
            ]
            return 200, json.dumps(files).encode(), {}
        prefix = f"/{self.repository}/resolve/{COMMIT}/"
        file = self.folder / path.removeprefix(prefix)
        if path.startswith(prefix) and file.is_file():
            return 200, file.read_bytes(), {"ETag": f'"{_etag(file)}"', "X-Repo-Commit": COMMIT}
        return 404, b"{}", {"X-Error-Code": "RepoNotFound"}

    def _handler(self):
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                hub.asked.append(self.path)
                status, content, headers = hub._answer(self.path)
                self.send_response(status)
                for name, value in (headers | {"Content-Length": str(len(content))}).items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(content)

            do_HEAD = do_GET  # noqa: N815

            def log_message(self, *_):
                pass

        return Handler


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()
