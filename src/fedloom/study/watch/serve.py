"""The server of `fedloom watch`: only on loopback and read-only. No request names a file."""

import json
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from fedloom.common.errors import InvalidValue
from fedloom.study.watch.live import Watched

ADDRESS = "127.0.0.1"

MOST_READERS = 32
"""Connections at a time: each holds a page in memory until its reader has taken it."""

_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; script-src "
    "'unsafe-inline'; "
    "style-src 'unsafe-inline'; img-src data: blob:; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'none'",
}


class Server(ThreadingHTTPServer):
    """Serves the page of a folder of runs on this machine's loopback address."""

    daemon_threads = True

    def __init__(self, folder: Path, port: int) -> None:
        """Listen on a port. Raise `InvalidValue` when it is taken or may not be used."""
        self.watched = Watched(folder)
        self._free = threading.BoundedSemaphore(MOST_READERS)
        try:
            super().__init__((ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = (getattr(error, "strerror", None) or str(error)).lower()
            raise InvalidValue(
                f"port {port} cannot be used ({reason}): choose another with --port"
            ) from None

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_address[1]}/"

    @property
    def hosts(self) -> tuple[str, ...]:
        """Host headers of this server. A foreign page with a name that points here has another
        one.
        """
        port = self.server_address[1]
        return f"{ADDRESS}:{port}", f"localhost:{port}"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread; close it at once if there are too many."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection to its end."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore browsers that hang up in the middle."""


class _Handler(BaseHTTPRequestHandler):
    server: Server
    server_version, sys_version = "fedloom", ""
    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_GET(self) -> None:
        if self.headers.get("Host", "").lower() not in self.server.hosts:
            self._send(
                HTTPStatus.MISDIRECTED_REQUEST,
                "text/plain",
                "This server answers to its own address alone.\n",
            )
            return
        url = urlsplit(self.path)
        if url.path == "/state":
            self._send(HTTPStatus.OK, "application/json", json.dumps(self.server.watched.state()))
            return
        group = parse_qs(url.query).get("group", [None])[0]
        page = self.server.watched.page(group) if url.path == "/" else None
        if page is None:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", "There is no such page.\n")
        else:
            self._send(HTTPStatus.OK, "text/html", page)

    def do_HEAD(self) -> None:
        self.do_GET()

    def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing: the terminal is for the user."""
