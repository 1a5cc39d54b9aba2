"""The names of this machine's NVIDIA GPUs, as the driver tells them without its libraries."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http.client
import re
import ssl
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prfaas import logs
from prfaas.agent.config import AgentConfig, EngineConfig
from prfaas.agent.engine.protocol import Promised
from prfaas.errors import Fenced, IndexRefusal, ManagerUnreachable, RemoteProtocolError
from prfaas.index.engine.feed import EngineCacheFeed, EngineSource
from prfaas.index.membership import Engine, EngineLoad, Figures, LinkFigures, Node
from prfaas.kv.kinds import KINDS
from prfaas.kv.layout import Layout
from prfaas.pool_events import PoolChange
from prfaas.rpc.reporter import Reporter
from prfaas.transport.congestion.rate_estimator import LOSS_SEGMENTS
from prfaas.transport.net.tls import CertificateFiles, Certificates
from prfaas.transport.sender.stats import LinkStats
from prfaas.types import (
    AgentName,
    ClusterKind,
    ClusterName,
    CopyCommand,
    CopyEnd,
    InstanceId,
    InstanceRole,
    PoolCommand,
    ProbeCommand,
    TransferTiming,
)

DRIVER = Path("/proc/driver/nvidia")


def gpu_names(driver: Path = DRIVER) -> str:
    """Each name once, in order, such as "NVIDIA H200"; empty where there is no such GPU."""
    names = set()
    for file in driver.glob("gpus/*/information"):
        with contextlib.suppress(OSError):  # it may be the driver's users' alone
            found = re.search(r"^Model:\s*(\S.*)$", file.read_text(errors="replace"), re.MULTILINE)
            if found:
                names.add(found[1].strip())
    return " + ".join(sorted(names))


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
        self._urls: Mapping[InstanceId, str] = {
            InstanceId(engine.instance): engine.url.rstrip("/") for engine in engines
        }
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
            tls = self._certificates.client_context() if self._certificates else None
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


@dataclass
class _Last:
    """What a link's figures are compared with."""

    acknowledged_bytes: int
    sent_bytes: int
    retransmitted_bytes: int
    at: float
    is_probing: bool = False


class NodeReporter:
    """Feeds a reporter from pool and links. Runs on the agent's loop."""

    def __init__(
        self,
        config: AgentConfig,
        secret: bytes,
        *,
        epoch: int,
        wire_address: str,
        links: Callable[[], Iterable[LinkStats]],
        on_copy: Callable[[CopyCommand], None],
        layouts_of: Callable[[str, str], Sequence[Layout]],
        on_pool: Callable[[PoolCommand], None],
        on_probe: Callable[[ProbeCommand], None],
    ) -> None:
        """`epoch` grows with every start of the agent; blocks of an older one are void. `on_copy`, `on_pool` and
        `on_probe` hear commands.

        `layouts_of` gives the layouts of an instance of a model in the order of its ranks, () unless every rank is attached.
        """
        self._links = links
        self._loads = EngineLoads(config.engines, config.engine_certificates())
        self._last: dict[tuple[str, str], _Last] = {}
        node = _node(config, epoch, wire_address)
        tls = CertificateFiles.of(config)
        self.reporter = Reporter(
            config.managers,
            node=node,
            secret=secret,
            figures=self.figures,
            on_copy=on_copy,
            on_pool=on_pool,
            on_probe=on_probe,
            tls=tls,
        )
        self._caches = [
            EngineCacheFeed(
                EngineSource(InstanceId(engine.instance), engine.kv_events, engine.kv_events_replay),
                layouts=functools.partial(layouts_of, engine.instance, engine.model),
                add_layout=self.reporter.add_layout,
                publish=self.reporter.publish,
            )
            for engine in config.engines
            if engine.kv_events
        ]

    async def run(self) -> None:
        """Report until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.reporter.run())
            tasks.create_task(self._loads.watch_forever())
            for cache in self._caches:
                tasks.create_task(cache.run())

    def add_layout(self, layout: Layout) -> None:
        """An engine brought this layout; comes before its blocks."""
        self.reporter.add_layout(layout)

    def on_change(self, change: PoolChange) -> None:
        self.reporter.publish((change,))

    def on_promise(self, promise: Promised) -> None:
        """An engine says how a decision turned out.

        Raises:
            RemoteProtocolError: in what is no number of tokens.
        """
        if not (_is_of_tokens(promise.predicted_tokens) and _is_of_tokens(promise.found_tokens)):
            raise RemoteProtocolError("malformed", f"{promise.found_tokens} tokens of {promise.predicted_tokens}")
        held = {its[0]: its[1] for its in promise.held_tokens or () if _is_of_a_group(its)}
        self.reporter.note_promise(
            predicted_tokens=promise.predicted_tokens, found_tokens=promise.found_tokens, held_tokens=held
        )

    def on_timing(self, timing: TransferTiming) -> None:
        """A transfer has ended here."""
        self.reporter.note_timing(timing)

    def on_copy_end(self, end: CopyEnd) -> None:
        """A command has ended here."""
        self.reporter.note_copy_end(end)

    async def drain(self, seconds: float) -> None:
        """Have what is asked for and only here moved to other nodes; returns when that has ended, or cannot be."""
        try:
            num_prefixes = await self.reporter.drain(seconds)
        except (ManagerUnreachable, IndexRefusal, Fenced) as error:
            _log.warning("drain.failed", error=str(error))
        else:
            _log.info("drain.complete", num_prefixes=num_prefixes)

    def status(self) -> dict[str, Any]:
        """How the reporting stands, for the status page."""
        return asdict(self.reporter.status)

    def figures(self) -> Figures:
        """Of its links and engines, now; rates are since they were asked for last."""
        states = self._links()
        figures = Figures(links=tuple(map(self._link, states)), engines=self._loads.current())
        present = {(state.peer, state.address) for state in states}
        self._last = {name: last for name, last in self._last.items() if name in present}
        return figures

    def _link(self, state: LinkStats) -> LinkFigures:
        now = time.monotonic()
        last = self._last.get((state.peer, state.address), _Last(0, 0, 0, now))
        seconds = now - last.at
        rate = (state.acknowledged_bytes - last.acknowledged_bytes) / seconds if seconds else 0.0
        sent = state.sent_bytes - last.sent_bytes
        retransmitted = state.retransmitted_bytes - last.retransmitted_bytes
        self._last[state.peer, state.address] = _Last(
            state.acknowledged_bytes, state.sent_bytes, state.retransmitted_bytes, now, state.is_probing
        )
        counts = not (state.is_probing or last.is_probing)  # what a probe does to a link is no congestion
        is_enough = sent > 0 and sent >= LOSS_SEGMENTS * state.segment_bytes
        return LinkFigures(
            peer=AgentName(state.peer),
            bytes_per_second=rate,
            capacity_bytes_per_second=state.achievable_bytes_per_second,
            rtt_seconds=state.rtt_seconds if counts else state.min_rtt_seconds,
            min_rtt_seconds=state.min_rtt_seconds,
            queued_bytes=state.queued_bytes + state.unacknowledged_bytes if counts else 0,
            retransmit_ratio=retransmitted / sent if is_enough and counts else 0.0,
            num_connections=state.num_connections,
            is_down=state.is_down,
            queue_seconds=state.queue_seconds,
            congestion=state.congestion or "",
            limit=state.limit or "",
            is_probed=state.rate_source == "probe",
            least_bytes_per_second=state.least_bytes_per_second,
        )


def _node(config: AgentConfig, epoch: int, wire_address: str) -> Node:
    kind: ClusterKind = "prfaas" if config.cluster_kind == "prfaas" else "pd"
    return Node(
        name=AgentName(config.name),
        cluster=ClusterName(config.cluster),
        cluster_kind=kind,
        wire_address=config.advertise or wire_address,
        epoch=epoch,
        engines=tuple(
            Engine(InstanceId(engine.instance), engine.url, _role(engine.role), engine.model)
            for engine in config.engines
        ),
        hardware=config.hardware or gpu_names(),
        takes_probes=config.link_probe_bytes > 0,
    )


def _role(text: str) -> InstanceRole:
    return "prefill" if text == "prefill" else "decode" if text == "decode" else "both"


def _is_of_a_group(its: object) -> bool:
    """Whether that is [kind of KV group, tokens]."""
    if not isinstance(its, list) or len(its) != 2:
        return False
    return its[0] in KINDS and isinstance(its[1], int) and _is_of_tokens(its[1])


def _is_of_tokens(number: int) -> bool:
    """Whether so many tokens can be, as a manager is told of them."""
    return 0 <= number < 1 << 32
