"""How busy the engines beside this agent are, read from the Prometheus page that vLLM serves beside its API."""

from __future__ import annotations

import asyncio
import http.client
import re
import ssl
import time
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prfaas import logs
from prfaas.agent.config import EngineConfig
from prfaas.index.membership import EngineLoad
from prfaas.transport.tls import Certificates
from prfaas.types import InstanceId

PERIOD_SECONDS = 1.0
TIMEOUT_SECONDS = 2.0
STALE_SECONDS = 5.0  # an engine that has not answered for so long has no known load
MAX_PAGE_BYTES = 4 << 20
_MAX_REQUESTS = (1 << 32) - 1  # that a report to the manager can state
_SAMPLE = re.compile(
    rb"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc)(?:\{[^}]*\})? ([0-9.eE+-]+)$", re.MULTILINE
)
_log = logs.get("agent.engine_load")


@dataclass(frozen=True)
class _Seen:
    load: EngineLoad
    at: float


def load_from_page(instance: InstanceId, page: bytes) -> EngineLoad:
    """The load that a vLLM metrics page states; data-parallel ranks are added up, their KV usage is averaged.

    Raises:
        ValueError: the page has no vLLM figures, or one that cannot be.
    """
    values: dict[bytes, list[float]] = {}
    for name, value in _SAMPLE.findall(page):
        values.setdefault(name, []).append(float(value))
    running, waiting = values.get(b"num_requests_running"), values.get(b"num_requests_waiting")
    if running is None or waiting is None:
        raise ValueError("no vllm:num_requests_running and vllm:num_requests_waiting on its page")
    usage = values.get(b"kv_cache_usage_perc", [0.0])
    num_running, num_waiting, kv_usage_ratio = sum(running), sum(waiting), sum(usage) / len(usage)
    if not (0 <= num_running <= _MAX_REQUESTS and 0 <= num_waiting <= _MAX_REQUESTS and 0 <= kv_usage_ratio <= 1):
        raise ValueError(f"{num_running:g} running, {num_waiting:g} waiting, KV usage {kv_usage_ratio:g} on its page")
    return EngineLoad(instance, int(num_running), int(num_waiting), kv_usage_ratio)


class EngineLoads:
    """Asks every engine each second. `current` is for the event loop that `watch_forever` runs in."""

    def __init__(self, engines: Iterable[EngineConfig], certificates: Certificates | None = None) -> None:
        """`certificates`: what engines at https are shown and asked for; None: the system's authorities vouch for them."""
        self._certificates = certificates
        self._urls: Mapping[InstanceId, str] = {InstanceId(its.instance): its.url.rstrip("/") for its in engines}
        self._seen: dict[InstanceId, _Seen] = {}
        self._silent: set[InstanceId] = set()

    def current(self) -> tuple[EngineLoad, ...]:
        """The loads of the engines that answered lately."""
        oldest = time.monotonic() - STALE_SECONDS
        return tuple(seen.load for seen in self._seen.values() if seen.at >= oldest)

    async def watch_forever(self) -> None:
        """Ask until cancelled."""
        while self._urls:
            await asyncio.gather(*(self._ask(instance, url) for instance, url in self._urls.items()))
            await asyncio.sleep(PERIOD_SECONDS)

    async def _ask(self, instance: InstanceId, url: str) -> None:
        try:
            tls = self._certificates.dialling() if self._certificates else None
            load = load_from_page(instance, await asyncio.to_thread(_fetch, f"{url}/metrics", tls))
        except (OSError, ValueError, http.client.HTTPException) as error:
            if instance not in self._silent:
                _log.info("engine.load_unknown", instance=instance, error=str(error))
            self._silent.add(instance)
            return
        self._silent.discard(instance)
        self._seen[instance] = _Seen(load, time.monotonic())


def _fetch(url: str, tls: ssl.SSLContext | None) -> bytes:
    with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS, context=tls) as response:
        page: bytes = response.read(MAX_PAGE_BYTES)
        return page
