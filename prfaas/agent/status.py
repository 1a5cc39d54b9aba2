"""What is in this node's pool and on its SSD, in numbers: for the metrics and for the status page."""

from __future__ import annotations

import json
import socket
import threading
import typing
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server
from wsgiref.types import StartResponse, WSGIEnvironment

from prometheus_client import Gauge, make_wsgi_app

from prfaas import metrics
from prfaas.cachepool.pool import Pool
from prfaas.cachepool.ssd import SsdTier
from prfaas.errors import ConfigError
from prfaas.transport.congestion.rate_estimator import CongestionReason, LinkLimit
from prfaas.transport.sender.stats import LinkStats
from prfaas.units import join_address, split_address


def measure(pool: Pool, ssd: SsdTier | None, *, tenants: Iterable[str]) -> None:
    """Set the gauges; of tenants those that are named."""
    stats = pool.stats()
    for kind, count in stats.slots_by_kind.items():
        metrics.POOL_SLOTS.labels(kind=kind).set(count)
    metrics.POOL_NEWCOMER_BYTES.set(stats.probation_bytes)
    for tenant in tenants:
        metrics.POOL_TENANT_BYTES.labels(tenant=tenant).set(stats.tenant_bytes.get(tenant, 0))
    for kind, count in (ssd.slots_by_kind() if ssd else {}).items():
        metrics.SSD_SLOTS.labels(kind=kind).set(count)


def page(pool: Pool, ssd: SsdTier | None) -> dict[str, Any]:
    """The same for people."""
    stats = pool.stats()
    return {
        "pool": stats.slots_by_kind,
        "leases": stats.num_leases,
        "prefix_bytes": stats.prefix_bytes,
        "newcomer_bytes": stats.probation_bytes,
        "tenant_bytes": stats.tenant_bytes,
        "ssd": ssd.slots_by_kind() if ssd else None,
    }


REFRESH_SECONDS = 1.0
_WORDS: dict[Gauge, tuple[str, ...]] = {
    metrics.LINK_CONGESTED: typing.get_args(CongestionReason),
    metrics.LINK_LIMITED: typing.get_args(LinkLimit),
}
_NUMBERS: dict[Gauge, Callable[[LinkStats], float]] = {
    metrics.LINK_QUEUE_SECONDS: lambda its: its.queue_seconds,
    metrics.LINK_QUEUED_BYTES: lambda its: its.queued_bytes,
    metrics.LINK_UNSENT_BYTES: lambda its: its.unsent_bytes,
    metrics.LINK_UNACKNOWLEDGED_BYTES: lambda its: its.unacknowledged_bytes,
    metrics.LINK_RTT_SECONDS: lambda its: its.rtt_seconds,
    metrics.LINK_RTT_INFLATION: lambda its: its.rtt_seconds / its.min_rtt_seconds if its.min_rtt_seconds else 0.0,
    metrics.LINK_RETRANSMITS: lambda its: its.resent_ratio,
    metrics.LINK_UTILIZATION: lambda its: its.utilization_ratio,
    metrics.LINK_ACHIEVABLE: lambda its: its.achievable_bytes_per_second,
}


class LinkMetrics:
    """Sets the gauges of links, and takes away those of links that have gone."""

    def __init__(self, states: Callable[[], Iterable[LinkStats]]) -> None:
        self._states = states
        self._refreshed_at = float("-inf")
        self._peers: set[str] = set()

    def refresh(self, now: float) -> None:
        """Set them when they are due; `now` is monotonic seconds."""
        if now - self._refreshed_at < REFRESH_SECONDS:
            return
        self._refreshed_at = now
        states = sorted(self._states(), key=lambda its: its.num_connections)
        metrics.CONNECTIONS.labels(direction="out").set(sum(state.num_connections for state in states))
        by_peer = {state.peer: state for state in states}  # of a peer that has moved, the link that is in use
        for peer in self._peers - set(by_peer):
            _forget(peer)
        for peer, state in by_peer.items():
            _show(peer, state)
        self._peers = set(by_peer)


def _show(peer: str, state: LinkStats) -> None:
    for gauge, number in _NUMBERS.items():
        gauge.labels(peer=peer).set(number(state))
    for gauge, words in _WORDS.items():
        for word in words:
            gauge.labels(peer=peer, reason=word).set(word in (state.congestion, state.limit))


def _forget(peer: str) -> None:
    for gauge in _NUMBERS:
        gauge.remove(peer)
    for gauge, words in _WORDS.items():
        for word in words:
            gauge.remove(peer, word)


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
