"""A local server that answers as the Hugging Face hub does to those who create, fill and read models."""

import base64
import contextlib
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from huggingface_hub import constants

from vlightning.common.hub import hub_is_reachable

COMMIT = "0" * 39 + "1"
TOKEN, READS_ONLY = "hf_may_write", "hf_reads_only"


class Hub(BaseHTTPRequestHandler):
    """Holds the files of models in `models` and those of data sets in `datasets`, by name; `gated` are refused."""

    models: dict[str, dict[str, bytes]]
    datasets: dict[str, dict[str, bytes]]
    gated: frozenset[str]
    private: dict[str, bool]

    def do_HEAD(self):
        self.read(body=False)

    def do_GET(self):
        self.read()

    def read(self, body=True):
        path = self.path.removeprefix("/api").lstrip("/")
        if not path:
            return self.send(200, {}, body)
        stored = self.datasets if path.startswith("datasets/") else self.models
        name, asked, rest = re.split("/(resolve|tree|revision)/", path + "/revision/", maxsplit=1)
        name = name.removeprefix("datasets/").removeprefix("models/")
        if name in self.gated:
            return self.send(403, {}, body, {"X-Error-Code": "GatedRepo", "X-Error-Message": "gated"})
        if name not in stored:
            return self.send(401, {}, body, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "none"})
        if asked == "resolve":
            content = stored[name].get(rest.partition("/")[2].removesuffix("/revision/"))
            return self.send(404 if content is None else 200, content or b"", body)
        tree = [
            {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for file, content in stored[name].items()
        ]
        listed = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": file} for file in stored[name]]}
        return self.send(200, tree if asked == "tree" else listed, body)

    def do_POST(self):
        sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.send(403, {"error": "no right"})
        if self.path == "/api/validate-yaml":
            assert json.loads(sent)["content"].startswith("---\n")
            return self.send(200, {"errors": [], "warnings": []})
        if self.path == "/api/repos/create":
            asked = json.loads(sent)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            if name in self.models:
                return self.send(409, {"error": "exists", "url": f"{constants.ENDPOINT}/{name}"})
            self.models[name] = {}
            # Newer versions of the library send "visibility".
            self.private[name] = asked.get("private", asked.get("visibility") == "private")
            return self.send(200, {"url": f"{constants.ENDPOINT}/{name}", "name": name, "id": "1"})
        name, _, action = self.path.removeprefix("/api/models/").rpartition("/")[0].rpartition("/")
        if action == "preupload":
            files = [{"path": file["path"], "uploadMode": "regular"} for file in json.loads(sent)["files"]]
            return self.send(200, {"files": [file | {"shouldIgnore": False, "oid": None} for file in files]})
        for line in sent.splitlines():
            part = json.loads(line)
            if part["key"] == "file":
                self.models[name][part["value"]["path"]] = base64.b64decode(part["value"]["content"])
        return self.send(200, {"commitUrl": f"{constants.ENDPOINT}/{name}", "commitOid": COMMIT, "success": True})

    def send(self, status, content, body=True, headers=()):
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        kept = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}
        for key, value in {**kept, "Content-Length": len(content), **dict(headers)}.items():
            self.send_header(key, str(value))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *words):
        pass


@contextlib.contextmanager
def local_hub(monkeypatch, cache, datasets=(), gated=()):
    """Within the context the hub is a local server without models; yields them, by name."""
    Hub.models, Hub.datasets, Hub.gated = {}, dict(datasets), frozenset(gated)
    Hub.private = {}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    set_hub(monkeypatch, f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    try:
        yield Hub.models
    finally:
        server.shutdown()
        server.server_close()
        hub_is_reachable.cache_clear()


def set_hub(monkeypatch, address):
    """Give the hub an address."""
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub_is_reachable.cache_clear()
