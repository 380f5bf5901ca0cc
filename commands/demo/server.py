"""The server of the page: for this machine only, with no file of the folder and nothing from elsewhere."""

import contextlib
import os
import re
import socket
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ...common.errors import UserError
from ...common.messages import say
from .folder import is_below
from .rendering import CSS
from .search import Search

HOST = "127.0.0.1"
HOSTS = (HOST, "localhost")
# What the page may load: what this server sends, and nothing else.
_POLICY = b"default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; frame-ancestors 'none'"


@contextlib.contextmanager
def bound(port: int) -> Iterator[socket.socket]:
    """Yield a socket that is bound to a port of this machine, a free one for 0.

    Raises:
        UserError: If the port is taken, or there is no such port.
    """
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # of a server that has just ended
        try:
            listener.bind((HOST, port))
        except (OSError, OverflowError) as error:
            raise UserError(
                f"Expected a free port after --port, got {port} ({error}): give another, or 0 for any."
            ) from None
        yield listener


def serve(search: Search, source: str | None, classes: Sequence[str], address: socket.socket) -> None:
    """Serve the page until it is interrupted; other arguments as of `build`."""
    # A dropped image is a file of Gradio's, which ends with the server.
    with tempfile.TemporaryDirectory(prefix="vlightning_demo_") as files:
        # Gradio reads these when it is imported.
        os.environ |= {"GRADIO_ANALYTICS_ENABLED": "False", "GRADIO_TEMP_DIR": files, "HF_HUB_DISABLE_TELEMETRY": "1"}
        import uvicorn

        class Server(uvicorn.Server):
            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                await super().startup(sockets)
                say(f"Demo: http://{HOST}:{address.getsockname()[1]} (stop it with Ctrl-C)")

        # Open pages hold a connection, which is not waited for.
        config = uvicorn.Config(application(search, source, classes), log_level="warning", timeout_graceful_shutdown=1)
        with contextlib.suppress(KeyboardInterrupt):
            Server(config).run(sockets=[address])


def application(search: Search, source: str | None, classes: Sequence[str]) -> Any:
    """Return the page as an ASGI application; arguments as of `serve`.

    Gradio serves the files that it received itself, and may serve none of the folder of the images.
    """
    import gradio
    from fastapi import FastAPI
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    from .page import build, theme

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard, files=os.environ["GRADIO_TEMP_DIR"])
    # Other names are those of other sites, which would let their pages read this one.
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(HOSTS))
    page = build(search, source, classes)
    # As `launch` sets it; without, Gradio takes the path of any file of the machine for that of a received one.
    page.has_launched = True
    return gradio.mount_gradio_app(
        app,
        page,
        path="/",
        server_name=HOST,
        footer_links=[],
        run_history=False,
        allowed_paths=[],
        blocked_paths=[str(search.folder.root)],
        max_file_size="64mb",
        show_error=False,
        ssr_mode=False,
        enable_monitoring=False,
        pwa=False,
        mcp_server=False,
        theme=theme(),
        css=CSS,
    )


class Guard:
    """Refuses other sites' requests and files that the page did not receive; the browser loads nothing from elsewhere.

    Gradio has checks of its own; these hold for each of its releases.

    Args:
        app: The application behind it.
        files: Folder of the dropped images.
    """

    def __init__(self, app: Any, files: str) -> None:
        self.app = app
        self.files = Path(files).resolve()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request, as ASGI asks."""

        async def with_policy(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"content-security-policy", _POLICY)]
            await send(message)

        headers = dict(scope["headers"]) if scope["type"] == "http" else {}
        request = (scope.get("path", ""), headers.get(b"host", b""), headers.get(b"origin", b""))
        if scope["type"] == "http" and not self.allows(*request):
            await send({"type": "http.response.start", "status": 403, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})
            return
        await self.app(scope, receive, with_policy)

    def allows(self, path: str, host: bytes = b"", origin: bytes = b"") -> bool:
        """Return whether a request may pass.

        Args:
            path: Path of its address: of no file, or of one that the page received.
            host: Name and port of its address.
            origin: Of the page that sends it, which must be this server's; empty for a person who types the address.
        """
        if origin and origin.lower() != b"http://" + host.lower():
            return False
        if "\0" in path:  # which no path of a file has
            return False
        if match := re.search(r"/file[=/](.*)", path, re.S):
            return match[1].startswith("/") and is_below(self.files, Path(match[1]))
        return "/proxy=" not in path
