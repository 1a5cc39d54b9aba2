"""Gauges of this node, and the HTTP server for its metrics and status pages."""

import json
import socket
import sys
import threading
import typing
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server
from wsgiref.types import StartResponse, WSGIEnvironment

from prometheus_client import Gauge, make_wsgi_app

from prfaas import logs, metrics
from prfaas.cachepool.pool import Pool
from prfaas.cachepool.ssd import SsdTier
from prfaas.errors import ConfigError
from prfaas.transport.congestion.rate_estimator import CongestionReason
from prfaas.transport.sender.stats import LinkStats
from prfaas.units import join_address, split_address

LINK_REFRESH_SECONDS = 1.0
REQUEST_TIMEOUT_SECONDS = 5.0
_log = logs.get("agent.status")
# `StatusServer.close` waits so long at most.
_SHUTDOWN_POLL_SECONDS = 0.05
_CONGESTION_REASONS: tuple[CongestionReason, ...] = typing.get_args(CongestionReason)
_NUMBER_GAUGES: dict[Gauge, Callable[[LinkStats], float]] = {
    metrics.LINK_QUEUED_BYTES: lambda link: link.queued_bytes,
    metrics.LINK_RTT_SECONDS: lambda link: link.rtt_seconds,
    metrics.LINK_RETRANSMITS: lambda link: link.resent_ratio,
    metrics.LINK_ACHIEVABLE: lambda link: link.achievable_bytes_per_second,
}


def measure_pool(pool: Pool) -> None:
    """Set the gauges of the pool."""
    for kind, count in pool.stats().slots_by_kind.items():
        metrics.POOL_SLOTS.labels(kind=kind).set(count)


def pool_page(pool: Pool, ssd: SsdTier | None) -> dict[str, Any]:
    """Return the figures of pool and SSD for the status page."""
    stats = pool.stats()
    return {
        "pool": stats.slots_by_kind,
        "leases": stats.num_leases,
        "tenant_bytes": stats.tenant_bytes,
        "ssd": ssd.pool.stats().slots_by_kind if ssd else None,
    }


class LinkMetrics:
    """Gauges of the links; those of closed links are removed."""

    def __init__(self, link_stats: Callable[[], Iterable[LinkStats]]) -> None:
        self._link_stats = link_stats
        self._refreshed_at = float("-inf")
        self._peers: set[str] = set()

    def refresh(self, now: float) -> None:
        """Set the gauges if a refresh is due; `now` is monotonic seconds."""
        if now - self._refreshed_at < LINK_REFRESH_SECONDS:
            return
        self._refreshed_at = now
        # A peer that has moved has two links; the link in use comes last and wins.
        links = sorted(self._link_stats(), key=lambda link: link.num_connections)
        by_peer = {link.peer: link for link in links}
        for peer in self._peers - by_peer.keys():
            for gauge in _NUMBER_GAUGES:
                gauge.remove(peer)
            for reason in _CONGESTION_REASONS:
                metrics.LINK_CONGESTED.remove(peer, reason)
        for peer, link in by_peer.items():
            for gauge, number in _NUMBER_GAUGES.items():
                gauge.labels(peer=peer).set(number(link))
            for reason in _CONGESTION_REASONS:
                metrics.LINK_CONGESTED.labels(peer=peer, reason=reason).set(reason == link.congestion)
        self._peers = set(by_peer)


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error of a document. A client that leaves within a request is none."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            _log.error("status.answer_failed", client=str(client_address[0]), error=repr(error))


class _ServerOverIPv6(_Server):
    address_family = socket.AF_INET6


class _QuietRequest(WSGIRequestHandler):
    timeout = REQUEST_TIMEOUT_SECONDS

    def log_message(self, format: str, *args: object) -> None:
        """Drop the access log: each scrape would write a line."""


class StatusServer:
    """HTTP server with its own threads for /metrics and JSON documents by path."""

    def __init__(self, address: str, documents: dict[str, Callable[[], Any]]) -> None:
        """Bind the address. Document functions are called from the server's threads.

        Raises:
            ConfigError: The address is taken, or does not belong to this machine.
        """
        host, port = split_address(address)
        self._documents = documents
        self._metrics = make_wsgi_app()
        server_class = _ServerOverIPv6 if ":" in host else _Server
        try:
            self._server = make_server(host, port, self._answer, server_class=server_class, handler_class=_QuietRequest)
        except OSError as error:
            raise ConfigError(f"status_listen: {address} cannot be bound ({error.strerror})") from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_SHUTDOWN_POLL_SECONDS,), name="status", daemon=True
        )

    @property
    def address(self) -> str:
        """Address that the server is bound to."""
        host, port = self._server.server_address[:2]
        return join_address(str(host), port)

    def start(self) -> None:
        """Start to serve."""
        self._thread.start()

    def close(self) -> None:
        """Stop to serve. A server that was never started has no loop that could end `shutdown`."""
        if self._thread.ident is not None:
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
