"""Reports of this node to the managers: links, engine loads, pool changes and outcomes of commands."""

import asyncio
import http.client
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from prfaas import logs
from prfaas.agent.config import AgentConfig, EngineConfig
from prfaas.agent.engine.protocol import Promised
from prfaas.agent.engine.tls_ports import announced_url
from prfaas.errors import RemoteProtocolError
from prfaas.index.membership import Engine, EngineLoad, Figures, LinkFigures, Node
from prfaas.rpc.reporter import Reporter
from prfaas.transport.congestion.rate_estimator import LOSS_SEGMENTS
from prfaas.transport.net.tls import Certificates
from prfaas.transport.sender.stats import LinkStats
from prfaas.types import AgentName, ClusterName, CopyCommand, InstanceId

LOAD_INTERVAL_SECONDS = 1.0
LOAD_TIMEOUT_SECONDS = 2.0
SILENCE_SECONDS = 2.0  # An engine that has not answered for so long gets no new requests.
AWAKE_SECONDS = 0.1
MAX_PAGE_BYTES = 4 << 20
# Largest number that a report to the manager can carry.
_MAX_U32 = (1 << 32) - 1
_SAMPLE = re.compile(
    rb"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc)(?:\{[^}]*\})? ([0-9.eE+-]+)$", re.MULTILINE
)
_log = logs.get("agent.report")


def load_from_page(instance: InstanceId, page: bytes) -> EngineLoad:
    """Return the load on a vLLM metrics page: requests summed over data-parallel ranks, KV usage averaged.

    Raises:
        ValueError: The page has no vLLM figures, or impossible ones.
    """
    values: dict[bytes, list[float]] = {}
    for name, value in _SAMPLE.findall(page):
        values.setdefault(name, []).append(float(value))
    running, waiting = values.get(b"num_requests_running"), values.get(b"num_requests_waiting")
    if running is None or waiting is None:
        raise ValueError("no vllm:num_requests_running and vllm:num_requests_waiting on its page")
    usage = values.get(b"kv_cache_usage_perc", [0.0])
    num_running, num_waiting, kv_usage_ratio = sum(running), sum(waiting), sum(usage) / len(usage)
    if not (0 <= num_running <= _MAX_U32 and 0 <= num_waiting <= _MAX_U32 and 0 <= kv_usage_ratio <= 1):
        raise ValueError(f"{num_running:g} running, {num_waiting:g} waiting, KV usage {kv_usage_ratio:g} on its page")
    return EngineLoad(instance, int(num_running), int(num_waiting), kv_usage_ratio)


class EngineLoads:
    """Health of this node's engines, and their loads from their metrics pages, asked each second."""

    def __init__(self, engines: Iterable[EngineConfig], certificates: Certificates | None = None) -> None:
        """`certificates` are for engines with https URLs; None trusts the system's authorities."""
        self._certificates = certificates
        self._urls: Mapping[InstanceId, str] = {
            InstanceId(engine.instance): engine.url.rstrip("/") for engine in engines
        }
        # A thread for each engine, so that nothing else in this process delays an answer.
        self._threads = ThreadPoolExecutor(max(1, len(self._urls)), thread_name_prefix="engine-load")
        self._awake_seconds = 0.0
        # Times of the oldest questions without an answer, in seconds awake.
        self._asked_at: dict[InstanceId, float] = {}
        self._loads: dict[InstanceId, EngineLoad] = {}
        self._unknown: set[InstanceId] = set()  # Logged once until the load is known again.

    def current(self) -> tuple[EngineLoad, ...]:
        """Return the last known loads, and which engines are silent."""
        silent_since, loads = self._awake_seconds - SILENCE_SECONDS, []
        for instance in self._urls:
            load = self._loads.get(instance)
            asked_at = self._asked_at.get(instance)
            if asked_at is not None and asked_at <= silent_since:
                loads.append(replace(load or EngineLoad(instance, 0, 0, 0.0), is_silent=True))
            elif load is not None:
                loads.append(load)
        return tuple(loads)

    async def watch_forever(self) -> None:
        """Ask every engine each second until cancelled. An engine that does not answer delays no other."""
        try:
            await asyncio.gather(
                self._count_awake(), *(self._watch(instance, url) for instance, url in self._urls.items())
            )
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def _count_awake(self) -> None:
        """Count the seconds in which this process ran. A pause of its own says nothing about an engine."""
        while True:
            started = time.monotonic()
            await asyncio.sleep(AWAKE_SECONDS)
            self._awake_seconds += min(time.monotonic() - started, 2 * AWAKE_SECONDS)

    async def _watch(self, instance: InstanceId, url: str) -> None:
        while True:
            started = time.monotonic()
            await self._ask(instance, url)
            await asyncio.sleep(max(0.0, started + LOAD_INTERVAL_SECONDS - time.monotonic()))

    async def _ask(self, instance: InstanceId, url: str) -> None:
        self._asked_at.setdefault(instance, self._awake_seconds)
        try:
            tls = self._certificates.client_context() if self._certificates else None
            loop = asyncio.get_running_loop()
            for path in ("health", "metrics"):  # A metrics page says nothing about the process that computes.
                page = await loop.run_in_executor(self._threads, _fetch, f"{url}/{path}", tls)
            self._asked_at.pop(instance)
            self._loads[instance] = load_from_page(instance, page)
            self._unknown.discard(instance)
        except (OSError, ValueError, http.client.HTTPException) as error:
            if isinstance(error, urllib.error.HTTPError):
                self._asked_at.pop(instance)
            if instance not in self._asked_at:  # It answered with another page than expected.
                self._loads.pop(instance, None)
            if instance not in self._unknown:
                _log.info("engine.load_unknown", instance=instance, error=str(error))
            self._unknown.add(instance)


def _fetch(url: str, tls: ssl.SSLContext | None) -> bytes:
    with urllib.request.urlopen(url, timeout=LOAD_TIMEOUT_SECONDS, context=tls) as response:
        page: bytes = response.read(MAX_PAGE_BYTES)
        return page


class NodeReporter:
    """Connection of pool, links and engines to the managers. Runs on the agent's loop."""

    def __init__(
        self,
        config: AgentConfig,
        secret: bytes,
        *,
        epoch: int,
        wire_address: str,
        link_stats: Callable[[], Iterable[LinkStats]],
        on_command: Callable[[CopyCommand], None],
    ) -> None:
        """Create the reporter; `on_command` gets the managers' commands.

        `epoch` grows with every start of the agent; blocks of an older epoch are void.
        """
        self._link_stats = link_stats
        self._loads = EngineLoads(config.engines, config.engine_certificates())
        # Figures of the previous report and its time, by peer and address.
        self._samples: dict[tuple[str, str], tuple[LinkStats, float]] = {}
        self.reporter = Reporter(
            config.managers,
            node=_node(config, epoch, wire_address),
            secret=secret,
            figures=self.figures,
            on_command=on_command,
            tls=config.tls.files(),
        )

    async def run(self) -> None:
        """Report until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.reporter.run())
            tasks.create_task(self._loads.watch_forever())

    def on_promise(self, promise: Promised) -> None:
        """Report the tokens that an engine found, against those that the router predicted.

        Raises:
            RemoteProtocolError: A number is out of range.
        """
        if not (_fits_u32(promise.predicted_tokens) and _fits_u32(promise.found_tokens)):
            raise RemoteProtocolError("malformed", f"{promise.found_tokens} tokens of {promise.predicted_tokens}")
        self.reporter.note_promise(predicted_tokens=promise.predicted_tokens, found_tokens=promise.found_tokens)

    def silent_engines(self) -> list[InstanceId]:
        """Return the engines that answer no health checks."""
        return [load.instance for load in self._loads.current() if load.is_silent]

    def figures(self) -> Figures:
        """Return the figures of links and engines; rates count from the previous call."""
        links = list(self._link_stats())
        figures = Figures(links=tuple(map(self._link_figures, links)), engines=self._loads.current())
        present = {(link.peer, link.address) for link in links}
        self._samples = {name: sample for name, sample in self._samples.items() if name in present}
        return figures

    def _link_figures(self, link: LinkStats) -> LinkFigures:
        now = time.monotonic()
        unsent = replace(link, acknowledged_bytes=0, sent_bytes=0, retransmitted_bytes=0)
        previous, taken_at = self._samples.get((link.peer, link.address), (unsent, now))
        seconds = now - taken_at
        rate = (link.acknowledged_bytes - previous.acknowledged_bytes) / seconds if seconds else 0.0
        sent = link.sent_bytes - previous.sent_bytes
        retransmitted = link.retransmitted_bytes - previous.retransmitted_bytes
        self._samples[link.peer, link.address] = link, now
        has_sample = sent > 0 and sent >= LOSS_SEGMENTS * link.segment_bytes
        return LinkFigures(
            peer=AgentName(link.peer),
            bytes_per_second=rate,
            capacity_bytes_per_second=link.achievable_bytes_per_second,
            rtt_seconds=link.rtt_seconds,
            min_rtt_seconds=link.min_rtt_seconds,
            queued_bytes=link.queued_bytes + link.unacknowledged_bytes,
            retransmit_ratio=retransmitted / sent if has_sample else 0.0,
            num_connections=link.num_connections,
            is_down=link.is_down,
            congestion=link.congestion or "",
        )


def _node(config: AgentConfig, epoch: int, wire_address: str) -> Node:
    wire = config.advertise or wire_address
    return Node(
        name=AgentName(config.name),
        cluster=ClusterName(config.cluster),
        cluster_kind=config.cluster_kind,
        wire_address=wire,
        epoch=epoch,
        engines=tuple(
            Engine(InstanceId(engine.instance), announced_url(engine, wire), engine.role, engine.model)
            for engine in config.engines
        ),
    )


def _fits_u32(number: int) -> bool:
    return 0 <= number <= _MAX_U32
