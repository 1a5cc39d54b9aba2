"""The agent: puts engines, pool and wire together on one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prfaas import grants, logs, metrics
from prfaas.agent import status as occupancy
from prfaas.agent.config import AgentConfig
from prfaas.agent.engine.protocol import (
    Attach,
    Attached,
    Cancel,
    Forget,
    Hold,
    Lookup,
    Message,
    Promised,
    Receive,
    Release,
    Send,
    Store,
)
from prfaas.agent.engine.server import EngineCallbacks, EngineConnection, EngineListener, OneATurn
from prfaas.agent.links import Links, RateLimits
from prfaas.agent.prefix.pins import Pins
from prfaas.agent.prefix.replicate import PrefixCopies
from prfaas.agent.prefix.store import PrefixStore
from prfaas.agent.status import LinkMetrics, StatusServer
from prfaas.agent.transfer.inbound import PendingClaims
from prfaas.agent.transfer.layouts import LayoutProbes, LayoutRegistry
from prfaas.agent.transfer.link_probe import InboundProbes, OutboundProbes
from prfaas.agent.transfer.log import TransferLog
from prfaas.agent.transfer.plan import check_castable
from prfaas.agent.transfer.receive import InboundTransfers, Reply
from prfaas.agent.transfer.send import OutboundTransfers
from prfaas.cachepool import eviction
from prfaas.cachepool.arena import Arena
from prfaas.cachepool.pool import Pool
from prfaas.cachepool.ssd import SsdTier
from prfaas.errors import LayoutError
from prfaas.kv.layout import Layout
from prfaas.pool_events import PoolChange
from prfaas.transport.codec import fp8
from prfaas.transport.net.tls_proxy import INNER, TlsProxy, tls_proxy_for
from prfaas.transport.receiver.api import OpenRequest, ReceiveEvent
from prfaas.transport.receiver.server import Receiver, ReceiverConfig
from prfaas.transport.sender.api import SendEvent
from prfaas.types import AgentName, CopyEnd, TransferTiming

if TYPE_CHECKING:
    from prfaas.agent.report import NodeReporter

MakeReporting = Callable[..., "NodeReporter"]
TICK_SECONDS = 0.1  # deadlines are looked at this often
_log = logs.get("agent")


class Agent:
    """One machine's pool and wire. `run` lives until it is cancelled and then ends every transfer with a reason."""

    def __init__(self, config: AgentConfig, secret: bytes, *, report: MakeReporting | None = None) -> None:
        """`report` makes what tells the managers of this node; without it the agent stands alone."""
        self._config = config
        self._secret = secret
        self._make_reporting = report
        self._reporting: NodeReporter | None = None
        self._name = AgentName(config.name)
        self._epoch = time.time_ns() // 1_000_000
        self._certificates = config.certificates()
        if config.lossy_fp8:
            fp8.check()
        wire_key = grants.derive_key(secret, "wire")
        self._links = Links(config, key=wire_key, certificates=self._certificates, on_event=self._sent_from_thread)
        self._link_metrics = LinkMetrics(self._links.states)
        self._pool = Pool(
            config.pool_bytes,
            transfer_ratio=config.transfer_ratio,
            eviction=eviction.policy_of(config.eviction),
            shares=config.shares(),
            on_change=self._on_pool_change,
        )
        self._layouts = LayoutRegistry(self._name, self._pool)
        self._probing = LayoutProbes(config.peers, self._links.to)
        settings = config.ssd()
        self._ssd = (
            None if settings is None else SsdTier(settings, self._pool, post=self._hand_over, on_change=self._announce)
        )
        self._transfer_log = TransferLog(self._report_timing)
        grant_key = grants.derive_key(secret, "grant")
        handles = itertools.count(1)
        self._keeping = PrefixStore(self._pool, handles, ssd=self._ssd, ssd_wait_seconds=config.ssd_wait_seconds)
        self._sending = OutboundTransfers(
            name=self._name,
            grant_key=grant_key,
            pool=self._pool,
            handles=handles,
            link_to=self._links.to,
            transfer_log=self._transfer_log,
        )
        self._copying = PrefixCopies(
            name=self._name,
            grant_key=grant_key,
            pool=self._pool,
            arenas=self._layouts.native_arenas,
            ssd=self._ssd,
            link_to=self._links.to,
            transfer_log=self._transfer_log,
            report=self._report_end,
        )
        self._pins = Pins(self._pool, self._ssd, report=self._report_end)
        self._sent_probes = OutboundProbes(
            name=self._name,
            grant_key=grant_key,
            max_bytes=config.link_probe_bytes,
            link_to=self._links.to,
            states=self._links.states,
            report=self._report_end,
        )
        self._receiving = InboundTransfers(
            name=self._name,
            grant_key=grant_key,
            pool=self._pool,
            layouts=self._layouts,
            transfer_log=self._transfer_log,
            open_timeout_seconds=config.open_timeout_seconds,
            in_background=self._in_background,
            probes=InboundProbes(name=self._name, grant_key=grant_key, max_bytes=config.link_probe_bytes),
        )
        self._take_open = OneATurn(self._receiving.on_open)
        self._early = PendingClaims()
        callbacks = EngineCallbacks(self._attach, self._on_attached, self._on_message, self._read_ring, self._on_lost)
        self._engines = EngineListener(Path(config.socket), callbacks)
        self._receiver = Receiver(
            ReceiverConfig(
                listen=config.listen,
                certificates=self._certificates,
                insecure_plaintext=config.insecure_plaintext,
                reconnect_seconds=config.reconnect_seconds,
                congestion_control=config.congestion_control,
                num_connections=config.num_connections,
                fetch_from=config.fetch_addresses(),
                lossy_fp8=config.lossy_fp8,
                ingress_of=RateLimits(config.ingress).of,
            ),
            local_name=config.name,
            key=wire_key,
            accept=self._accept_from_thread,
            on_event=self._received_from_thread,
            send_over=self._links.awaited(),
        )
        self._receiving.receiver = self._receiver
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wire = ""  # where it listens, once it does

    # Life

    async def run(self, started: Callable[[str], None] = lambda address: None) -> None:
        """Serve until cancelled, then drain; cancelled again, stop at once.

        `started` hears the wire's address once everything listens.

        Raises:
            ConfigError: one of its addresses is taken, or not to be listened at.
        """
        self._loop = asyncio.get_running_loop()
        async with contextlib.AsyncExitStack() as closing:
            closing.callback(_log.info, "agent.stopped", name=self._name)
            closing.callback(self._pool.close)
            if self._ssd is not None:
                closing.callback(self._ssd.close)
            door = self._pages_door()
            if door is not None:
                closing.push_async_callback(door.close)
            status = self._status_server(INNER if door else self._config.status_listen)
            closing.callback(status.close)
            closing.callback(self._receiver.close)
            closing.callback(self._links.close)
            closing.push_async_callback(self._engines.close)
            await self._engines.start()
            address = self._wire = self._receiver.start()
            status.start()
            if door is not None:
                door.start(status.address)
            pages = door.address if door else status.address
            _log.info("agent.started", name=self._name, wire=address, socket=self._config.socket, status=pages)
            started(address)
            await self._serve_and_drain(asyncio.ensure_future(self._serve(address)))

    def _status_server(self, address: str) -> StatusServer:
        documents = {
            "/healthz": self._health,
            "/status": self._status,
            "/node": self._node,
            "/transfers": self._transfer_log.to_list,
        }
        return StatusServer(address, documents)

    def _pages_door(self) -> TlsProxy | None:
        """Raises ConfigError: the address of the pages is taken, or the certificates cannot be used."""
        return tls_proxy_for(
            self._config.status_listen,
            self._config.certificates(speaks=("http/1.1",)),
            setting="status_listen",
            allows_plaintext=self._config.insecure_plaintext,
            refused=lambda reason: metrics.PAGES_REFUSALS.labels(reason=reason).inc(),
        )

    async def _serve(self, address: str) -> None:
        async with asyncio.TaskGroup() as tasks:
            if self._make_reporting is not None:
                self._reporting = self._make_reporting(
                    self._config,
                    self._secret,
                    epoch=self._epoch,
                    wire_address=address,
                    links=self._links.states,
                    on_copy=self._copying.take,
                    layouts_of=self._layouts_of,
                    on_pool=self._pins.take,
                    on_probe=self._sent_probes.take,
                )
                tasks.create_task(self._reporting.run())
            if self._ssd is not None:
                self._ssd.restore(self._add_layout)
            tasks.create_task(self._tick_forever())

    async def _serve_and_drain(self, serving: asyncio.Future[None]) -> None:
        """Whoever drains still serves: its copies leave over the wire, and its manager hears from it."""
        try:
            await asyncio.shield(serving)
        except asyncio.CancelledError:
            if self._reporting is not None and self._config.drain_seconds:
                await self._reporting.drain(self._config.drain_seconds)
            raise
        finally:
            serving.cancel()
            await asyncio.wait([serving])

    async def _tick_forever(self) -> None:
        while True:
            now = time.monotonic()
            self._receiving.expire(now)
            self._keeping.expire(now)
            self._sent_probes.expire(now)
            for link in self._links.take_idle(now):
                asyncio.get_running_loop().run_in_executor(None, link.close)
            if self._ssd is not None:
                self._ssd.pump()
            self._measure(now)
            await asyncio.sleep(TICK_SECONDS)

    def _measure(self, now: float) -> None:
        occupancy.measure(self._pool, self._ssd, tenants=(tenant.tenant for tenant in self._config.tenants))
        self._link_metrics.refresh(now)
        metrics.CONNECTIONS.labels(direction="in").set(self._receiver.num_connections)

    def _layouts_of(self, instance: str, model: str) -> list[Layout]:
        return [worker.layout for worker in self._engines.workers_of(instance, model) if worker.layout is not None]

    def _on_pool_change(self, change: PoolChange) -> None:
        if self._ssd is not None:
            self._ssd.offer(change)
        self._announce(change)

    def _announce(self, change: PoolChange) -> None:
        if self._reporting is not None:
            self._reporting.on_change(change)

    def _report_timing(self, timing: TransferTiming) -> None:
        if self._reporting is not None:
            self._reporting.on_timing(timing)

    def _report_end(self, end: CopyEnd) -> None:
        if self._reporting is not None:
            self._reporting.on_copy_end(end)

    # Engines

    async def _attach(self, attach: Attach, layout: Layout | None) -> tuple[Attached, Arena | None]:
        if layout is None:
            return Attached(self._name, 0, 0, 0, self._epoch), None
        if self._config.lossy_fp8:
            check_castable(layout)
        found = await self._probing.conflict(layout)
        if found is not None:
            raise LayoutError(found)
        self._engines.check_beside(attach, layout)  # nothing is awaited from here on until it is among them
        try:
            arena = self._pool.arena(layout)
        except OSError as error:
            raise LayoutError(f"no arena can be made: {error.strerror}") from error
        arena.pinned |= attach.pins_arena
        self._add_layout(layout)
        return Attached(self._name, arena.num_slots, arena.stride_bytes, arena.header_bytes, self._epoch), arena

    def _add_layout(self, layout: Layout) -> None:
        self._layouts.attached(layout)
        if self._reporting is not None:
            self._reporting.add_layout(layout)

    def _on_attached(self, engine: EngineConnection) -> None:
        if self._engines.workers(engine.attach.instance):
            for scheduler, message in self._early.take(engine.attach.instance):
                self._on_message(scheduler, message)

    def _on_message(self, engine: EngineConnection, message: Message) -> None:
        workers = self._engines.workers(engine.attach.instance)
        if isinstance(message, Send | Receive) and not workers:
            self._early.keep(engine, message)
        elif isinstance(message, Send):
            self._sending.open(engine, workers, message)
        elif isinstance(message, Receive):
            arenas = tuple(worker.arena for worker in workers if worker.arena is not None)
            self._receiving.claim(engine, arenas, message)
        elif isinstance(message, Store | Lookup | Hold):
            self._keeping.on_message(engine, workers, message)
        elif isinstance(message, Promised):
            if self._reporting is not None:
                self._reporting.on_promise(message)
        elif isinstance(message, Forget):
            self._forget(engine, message)
        elif isinstance(message, Release | Cancel):
            self._early.drop(engine, message.transfer_id)
            self._end(engine.attach.instance, message)

    def _forget(self, engine: EngineConnection, request: Forget) -> None:
        """Nobody finds what was computed for a model before, here, on its way here, or, from here, elsewhere."""
        self._copying.forget(request.model)
        self._receiving.forget(request.model)
        self._keeping.forget(engine, request)
        self._pins.drop_absent()

    def _end(self, instance: str, message: Release | Cancel) -> None:
        """An engine ends its own part; of a transfer within this node the other part is another engine's."""
        self._keeping.end(message.transfer_id, instance)
        self._receiving.release(message.transfer_id, instance)
        if isinstance(message, Cancel):
            self._sending.engine_done(message.transfer_id, instance)

    def _read_ring(self, worker: EngineConnection) -> None:
        """Take what a worker has written to its ring since."""
        for entry in worker.ring.drain() if worker.ring else ():
            self._sending.on_ring(worker, entry)
            self._keeping.on_ring(worker, entry)

    def _on_lost(self, engine: EngineConnection) -> None:
        self._early.forget(engine)
        instance = engine.attach.instance
        entirely = not any(other.attach.instance == instance for other in self._engines.connections)
        self._sending.engine_lost(engine, entirely=entirely)
        self._keeping.engine_lost(engine, entirely=entirely)
        self._receiving.engine_lost(engine)

    # The wire: its threads hand everything over to the loop

    def _hand_over(self, function: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: the agent has stopped
            self._loop.call_soon_threadsafe(function, *arguments)

    def _in_background(self, work: Callable[[], None], then: Callable[[bool], None]) -> None:
        def ended(future: asyncio.Future[None]) -> None:
            if not future.cancelled():
                if error := future.exception():
                    _log.error("background.failed", message=repr(error))
                then(error is None)

        assert self._loop is not None
        self._loop.run_in_executor(None, work).add_done_callback(ended)

    def _sent_from_thread(self, event: SendEvent) -> None:
        self._hand_over(self._on_sent, event)

    def _received_from_thread(self, event: ReceiveEvent) -> None:
        self._hand_over(self._receiving.on_event, event)

    def _accept_from_thread(self, request: OpenRequest, reply: Reply) -> None:
        self._hand_over(self._take_open, request, reply)

    def _on_sent(self, event: SendEvent) -> None:
        if not self._probing.on_event(event):
            self._sending.on_event(event)
            self._copying.on_event(event)
            self._sent_probes.on_event(event)

    # Pages

    def _health(self) -> dict[str, Any]:
        return {"status": "ok", "name": self._name}

    def _node(self) -> dict[str, Any]:
        """What a router without managers must know of this node."""
        its = self._config
        return {
            "name": its.name,
            "cluster": its.cluster,
            "cluster_kind": its.cluster_kind,
            "wire_address": its.advertise or self._wire,
            "engines": [
                {"instance": engine.instance, "url": engine.url, "role": engine.role} for engine in its.engines
            ],
        }

    def _status(self) -> dict[str, Any]:
        return {
            "name": self._name,
            "encrypted": self._certificates is not None,
            "sending": len(self._sending),
            "copying": len(self._copying),
            "receiving": len(self._receiving),
            "prefix_store": len(self._keeping),
            "pending_claims": len(self._early),
            **occupancy.page(self._pool, self._ssd),
            "pins": self._pins.status(),
            "engines": [f"{c.attach.instance}/{c.attach.role}/{c.attach.rank}" for c in self._engines.connections],
            "reverse_connections": [asdict(inlet) for inlet in self._receiver.reverse_dials()],
            "links": self._links.page(),
            "reporting": self._reporting.status() if self._reporting else None,
        }
