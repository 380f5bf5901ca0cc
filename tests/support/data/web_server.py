"""A server of files in a thread of the test, with ranges; it refuses reads without its user, or without a signature."""

import base64
import contextlib
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@contextlib.contextmanager
def web_server(folder: Path, user: str = "", signed: dict[str, str] | None = None):
    """Serve the files of a folder on the loopback address; yield the address without a scheme.

    Args:
        folder: the folder.
        user: name and password, as in "bob:secret", that each read needs.
        signed: query that the read of a file needs, by name of the file.
    """
    right = f"Basic {base64.b64encode(user.encode()).decode()}"

    class Server(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.read(body=False)

        def do_GET(self):
            self.read()

        def read(self, body=True):
            path, _, query = self.path.partition("?")
            file = folder / path.lstrip("/")
            if (user and self.headers.get("Authorization") != right) or query != (signed or {}).get(file.name, ""):
                return self.answer(403, b"", body)
            if not file.is_file():
                return self.answer(404, b"", body)
            content = file.read_bytes()
            if found := re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
                start, stop = int(found[1]), min(int(found[2] or len(content)), len(content) - 1)
                return self.answer(206, content[start : stop + 1], body, f"bytes {start}-{stop}/{len(content)}")
            return self.answer(200, content, body)

        def answer(self, status, content, body, part=None):
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Accept-Ranges", "bytes")
            if part:
                self.send_header("Content-Range", part)
            self.end_headers()
            if body:
                self.wfile.write(content)

        def log_message(self, *words):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
