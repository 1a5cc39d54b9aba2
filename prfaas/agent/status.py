"""The agent's HTTP page for people and Prometheus: /metrics, /healthz, /status and /transfers."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server
from wsgiref.types import StartResponse, WSGIEnvironment

from prometheus_client import make_wsgi_app

from prfaas.errors import ConfigError
from prfaas.units import join_address, split_address

REQUEST_TIMEOUT_SECONDS = 5.0
_LOOK_SECONDS = 0.05  # between looks at whether the agent stops, which waits for one


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _ServerOverIPv6(_Server):
    address_family = socket.AF_INET6


class _QuietRequest(WSGIRequestHandler):
    timeout = REQUEST_TIMEOUT_SECONDS

    def log_message(self, format: str, *args: object) -> None:
        """One line per scrape tells nobody anything."""


class StatusServer:
    """Serves JSON documents by path, beside /metrics, from threads of its own."""

    def __init__(self, address: str, documents: dict[str, Callable[[], Any]]) -> None:
        """Bind; a document is asked for at every request and must not touch the agent's loop.

        Raises:
            ConfigError: the address is taken, or not this machine's.
        """
        host, port = split_address(address)
        self._documents = documents
        self._metrics = make_wsgi_app()
        kind = _ServerOverIPv6 if ":" in host else _Server
        try:
            self._server = make_server(host, port, self._answer, server_class=kind, handler_class=_QuietRequest)
        except OSError as error:
            raise ConfigError(f"status_listen: {address} cannot be bound ({error.strerror})") from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_LOOK_SECONDS,), name="status", daemon=True
        )

    @property
    def address(self) -> str:
        host, port = self._server.server_address[:2]
        return join_address(str(host), port)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        if self._thread.ident is not None:  # else nobody would ever end `shutdown`
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def _answer(self, environment: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environment.get("PATH_INFO", "/")
        if path == "/metrics":
            page: Iterable[bytes] = self._metrics(environment, start_response)
            return page
        document = self._documents.get(path)
        if document is None:
            start_response("404 Not Found", [("Content-Type", "text/plain")])
            return [f"paths: /metrics {' '.join(self._documents)}\n".encode()]
        body = json.dumps(document()).encode()
        start_response("200 OK", [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
        return [body]
