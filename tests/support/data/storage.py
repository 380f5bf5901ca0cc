"""Storages that fail: a file system of `fsspec` in memory, and a server of S3 in a thread of the test."""

import contextlib
import os
from threading import Thread
from typing import ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem


class Flaky(MemoryFileSystem):
    """Files in memory, whose reads are recorded and go wrong.

    Attributes:
        reads: path, first byte and byte after the end of each read.
        fault: returns what happens to a read of a path, "throttled", "failed" or "cut"; None if nothing does.
    """

    protocol = "flaky"
    store: ClassVar = {}
    pseudo_dirs: ClassVar = [""]
    reads: ClassVar = []
    fault = staticmethod(lambda path: None)

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).replace("flaky://", "memory://"))

    def cat_file(self, path, start=None, end=None, **kwargs):
        data = super().cat_file(path, start, end)
        Flaky.reads.append((path, start, end))
        fault = Flaky.fault(path)
        if fault == "throttled":
            raise OSError("SlowDown: reduce your request rate")
        if fault == "failed":
            raise ConnectionResetError("connection reset by peer")
        return data[: len(data) // 2] if fault == "cut" else data


fsspec.register_implementation("flaky", Flaky, clobber=True)


def upload(folder, root):
    """Copy the files of a folder to a root by URL, such as `flaky://data`, and return the root."""
    system, place = fsspec.core.url_to_fs(root)
    for file in folder.rglob("*"):
        if file.is_file():
            system.pipe_file(f"{place}/{file.relative_to(folder)}", file.read_bytes())
    return root


class FaultyApp:
    """A WSGI application whose answers to reads of objects go wrong in turn, one of three."""

    def __init__(self, app):
        self.app, self.count, self.faults = app, 0, {"throttled": 0, "failed": 0, "cut": 0}
        self.always = None

    def __call__(self, environ, start_response):
        self.count += environ["REQUEST_METHOD"] == "GET" and "HTTP_RANGE" in environ
        kind = self.always or (list(self.faults)[self.count // 3 % 3] if self.count % 3 == 0 else None)
        if kind is None or environ["REQUEST_METHOD"] != "GET" or "HTTP_RANGE" not in environ:
            return self.app(environ, start_response)
        self.faults[kind] += 1
        if kind == "cut":
            body = b"".join(self.app(environ, start_response))
            return [body[: len(body) // 2]]  # the header says that there is more
        status, code = ("503 Slow Down", "SlowDown") if kind == "throttled" else ("500 Internal", "InternalError")
        start_response(status, [("Content-Type", "application/xml")])
        return [f"<Error><Code>{code}</Code><Message>{kind}</Message></Error>".encode()]


@contextlib.contextmanager
def s3_server(monkeypatch):
    """Run moto's server of S3 in a thread, with a bucket `pairs`; yield its application, or skip the test."""
    pytest.importorskip("s3fs", reason="the extra s3 is not installed")
    server = pytest.importorskip("moto.server", reason="moto[server] is not installed")
    import s3fs
    from werkzeug.serving import make_server

    app = FaultyApp(server.DomainDispatcherApplication(server.create_backend_app))
    running = make_server("127.0.0.1", 0, app, threaded=True, request_handler=_quiet(server.MotoRequestHandler))
    thread = Thread(target=running.serve_forever, daemon=True)
    thread.start()
    settings = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{running.server_port}", "AWS_MAX_ATTEMPTS": "1"}
    settings |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("no_proxy", os.environ.get("no_proxy", "") + ",127.0.0.1")
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().makedirs("pairs", exist_ok=True)  # kept from a server before it
    try:
        yield app
    finally:
        running.shutdown()
        thread.join()
        s3fs.S3FileSystem.clear_instance_cache()


def _quiet(handler):
    return type("Quiet", (handler,), {"log": lambda self, *args: None})
