"""The agent: one event loop that connects engines, pool, links and managers.

`Agent.__init__` creates the parts, `run` starts them and ends them in reverse order. Engines' messages and commands of
managers arrive on the loop. Threads of links and receiver hand their events over to it.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prfaas import grants, logs, metrics
from prfaas.agent.config import AgentConfig
from prfaas.agent.engine.protocol import (
    Alive,
    Attach,
    Attached,
    Cancel,
    FindBlocks,
    Forget,
    Heartbeat,
    Hold,
    Lookup,
    Message,
    Promised,
    Receive,
    Release,
    Send,
    Store,
)
from prfaas.agent.engine.server import EngineCallbacks, EngineConnection, EngineListener, arenas_of
from prfaas.agent.engine.tls_ports import start_tls_ports
from prfaas.agent.links import Links
from prfaas.agent.prefix.replicate import PrefixCopies
from prfaas.agent.prefix.store import PrefixStore
from prfaas.agent.status import LinkMetrics, StatusServer, measure_pool, pool_page
from prfaas.agent.transfer.grant_check import GrantCheck
from prfaas.agent.transfer.layouts import LayoutRegistry
from prfaas.agent.transfer.log import TransferLog
from prfaas.agent.transfer.receive import InboundTransfers, Reply
from prfaas.agent.transfer.send import OutboundTransfers
from prfaas.cachepool.arena import Arena
from prfaas.cachepool.pool import Pool
from prfaas.cachepool.ssd import SsdTier
from prfaas.errors import LayoutError
from prfaas.kv.layout import Layout, siblings
from prfaas.pool_events import PoolChange
from prfaas.transport.net.tls_proxy import INNER, TlsProxy, tls_proxy_for
from prfaas.transport.receiver.api import OpenRequest
from prfaas.transport.receiver.server import Receiver, ReceiverConfig
from prfaas.transport.sender.api import SendEvent
from prfaas.types import AgentName, CopyEnd, TransferTiming

if TYPE_CHECKING:
    from prfaas.agent.report import NodeReporter

MakeReporter = Callable[..., "NodeReporter"]
# Deadlines are checked so often.
TICK_SECONDS = 0.1
# The system zeroes about 2 GB a second.
POPULATE_STEP_BYTES = 64 << 20
_log = logs.get("agent")


class Agent:
    """One machine's pool, and all its KV transfers."""

    def __init__(self, config: AgentConfig, secret: bytes, *, report: MakeReporter | None = None) -> None:
        """`report` makes the connection to the managers; without it the agent has none."""
        self._config = config
        self._secret = secret
        self._make_reporter = report
        self._reporter: NodeReporter | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._name = AgentName(config.name)
        self._epoch = time.time_ns() // 1_000_000
        self._certificates = config.certificates()
        wire_key = grants.derive_key(secret, "wire")
        grant_check = GrantCheck(self._name, grants.derive_key(secret, "grant"))
        handles = itertools.count(1)
        self._transfer_log = TransferLog(self._report_timing)

        # Pool
        self._pool = Pool(
            config.pool_bytes,
            transfer_ratio=config.transfer_ratio,
            shares=config.shares(),
            on_change=self._on_pool_change,
        )
        self._populated: asyncio.Queue[Arena] = asyncio.Queue()
        self._ssd: SsdTier | None = None
        if config.ssd_directory is not None:
            self._ssd = SsdTier(
                config.ssd_directory,
                config.ssd_bytes,
                self._pool,
                write_bytes_per_second=config.ssd_write_rate,
                post=self._call_on_loop,
                on_change=self._report_change,
            )
        self._layouts = LayoutRegistry(self._name, self._pool)
        # Fingerprints of layouts whose blocks have hashes that the index does not know.
        self._unreported: set[bytes] = set()
        self._prefix_store = PrefixStore(self._pool, handles, ssd=self._ssd)

        # Links, and all that leaves over them
        on_link_event = partial(self._call_on_loop, self._on_link_event)
        self._links = Links(config, key=wire_key, certificates=self._certificates, on_event=on_link_event)
        self._link_metrics = LinkMetrics(self._links.stats)
        self._outbound = OutboundTransfers(
            grant_check=grant_check,
            pool=self._pool,
            handles=handles,
            link_to=self._links.to,
            transfer_log=self._transfer_log,
        )
        self._copies = PrefixCopies(
            grant_check=grant_check,
            pool=self._pool,
            arenas=self._layouts.native_arenas,
            link_to=self._links.to,
            transfer_log=self._transfer_log,
            report=self._report_end,
        )
        # Receiver, and all that arrives
        self._opens: asyncio.Queue[tuple[OpenRequest, Reply]] = asyncio.Queue()
        self._inbound = InboundTransfers(
            grant_check=grant_check,
            pool=self._pool,
            layouts=self._layouts,
            transfer_log=self._transfer_log,
            open_timeout_seconds=config.open_timeout_seconds,
            in_background=self._in_background,
        )
        self._receiver = self._inbound.receiver = Receiver(
            ReceiverConfig(
                listen=config.listen,
                certificates=self._certificates,
                insecure_plaintext=config.insecure_plaintext,
                silence_seconds=config.silence_seconds,
                marks=config.dscp,
                fetch_from=config.fetch_addresses(),
            ),
            local_name=config.name,
            key=wire_key,
            accept=lambda request, reply: self._call_on_loop(self._opens.put_nowait, (request, reply)),
            on_event=partial(self._call_on_loop, self._inbound.on_event),
            send_over=self._links.reverse(),
        )

        # Engines
        # After a restart of the agent, schedulers usually attach before their workers, whose layouts are needed.
        self._pending_claims: list[tuple[EngineConnection, Send | Receive]] = []
        callbacks = EngineCallbacks(
            attach=self._attach,
            attached=self._on_attached,
            message=self._on_message,
            ring_written=self._on_ring_written,
            lost=self._on_lost,
        )
        self._engines = EngineListener(Path(config.socket), callbacks)

    # Start and end

    async def run(self, started: Callable[[str], None] = lambda address: None) -> None:
        """Serve until cancelled, then end every transfer.

        `started` gets the wire's address once everything listens.

        Raises:
            ConfigError: One of the addresses cannot be bound.
        """
        self._loop = asyncio.get_running_loop()
        async with contextlib.AsyncExitStack() as closing:
            closing.callback(_log.info, "agent.stopped", name=self._name)
            closing.callback(self._pool.close)
            if self._ssd is not None:
                closing.callback(self._ssd.close)
            proxy = self._page_proxy()
            if proxy is not None:
                closing.push_async_callback(proxy.close)
            status = StatusServer(INNER if proxy else self._config.status_listen, self._documents())
            closing.callback(status.close)
            closing.callback(self._receiver.close)
            closing.callback(self._links.close)
            closing.push_async_callback(self._engines.close)
            await self._engines.start()
            address = self._receiver.start()
            status.start()
            if proxy is not None:
                proxy.start(status.address)
            for engine_port in start_tls_ports(self._config):
                closing.push_async_callback(engine_port.close)
            pages = proxy.address if proxy else status.address
            _log.info("agent.started", name=self._name, wire=address, socket=self._config.socket, status=pages)
            started(address)
            await self._serve(address)

    def _page_proxy(self) -> TlsProxy | None:
        """Return the TLS proxy of the status pages, bound; None where they speak plain text.

        Raises:
            ConfigError: The address cannot be bound, or the certificates cannot be used.
        """
        return tls_proxy_for(
            self._config.status_listen,
            self._config.certificates(alpn_protocols=("http/1.1",)),
            setting="status_listen",
            allows_plaintext=self._config.insecure_plaintext,
            refused=lambda reason: metrics.PAGES_REFUSALS.labels(reason=reason).inc(),
        )

    async def _serve(self, address: str) -> None:
        async with asyncio.TaskGroup() as tasks:
            if self._make_reporter is not None:
                self._reporter = self._make_reporter(
                    self._config,
                    self._secret,
                    epoch=self._epoch,
                    wire_address=address,
                    link_stats=self._links.stats,
                    on_command=self._copies.take,
                )
                tasks.create_task(self._reporter.run())
            if self._ssd is not None:
                self._ssd.restore(self._add_layout)
            tasks.create_task(self._tick_forever())
            tasks.create_task(self._accept_opens())
            tasks.create_task(self._populate_arenas())

    async def _accept_opens(self) -> None:
        """Answer OPENs one per iteration of the event loop.

        An OPEN can take 15 ms to read. Between two of them the loop serves the engines' sockets, so a peer that sends many
        costly OPENs cannot make this agent silent.
        """
        while True:
            self._inbound.on_open(*await self._opens.get())
            await asyncio.sleep(0)

    async def _populate_arenas(self) -> None:
        """Back each arena with memory, in steps, since one call for all of it would take minutes."""
        while True:
            arena = await self._populated.get()
            num_bytes = 0
            max_ratio = 1 / arena.layout.shard.size
            while slots := self._pool.take_unbacked(arena, POPULATE_STEP_BYTES, max_ratio=max_ratio):
                try:
                    await asyncio.to_thread(arena.populate_later(slots))
                except OSError as error:
                    _log.warning("pool.not_populated", num_bytes=num_bytes, error=error.strerror)
                    break
                finally:
                    self._pool.put_back(arena, slots)
                before, num_bytes = num_bytes, num_bytes + len(slots) * arena.stride_bytes
                if num_bytes * 10 // self._pool.budget_bytes > before * 10 // self._pool.budget_bytes:
                    _log.info("pool.populated", num_bytes=num_bytes, pool_bytes=self._pool.budget_bytes)

    async def _tick_forever(self) -> None:
        while True:
            now = time.monotonic()
            self._inbound.expire(now)
            self._prefix_store.expire(now)
            for instance in self._reporter.silent_engines() if self._reporter else ():
                self._outbound.engine_silent(instance, now=now, seconds=self._config.silence_seconds)
            for link in self._links.take_idle(now):
                asyncio.get_running_loop().run_in_executor(None, link.close)
            if self._ssd is not None:
                self._ssd.pump()
            measure_pool(self._pool)
            self._link_metrics.refresh(now)
            await asyncio.sleep(TICK_SECONDS)

    # Engines

    def _attach(self, attach: Attach, layout: Layout | None) -> tuple[Attached, tuple[Arena, ...]]:
        """Return the answer to an engine, and a worker's arena and those of its siblings, from which it reads.

        Raises:
            LayoutError: The worker's layout is refused.
        """
        if layout is None:
            return Attached(self._name, 0, 0, 0, self._epoch), ()
        self._engines.check_conflicts(attach, layout)
        shared = siblings(layout)
        try:
            arenas = tuple(map(self._pool.arena, shared))
        except OSError as error:
            raise LayoutError(f"no arena can be made: {error.strerror}") from error
        for sibling, arena in zip(shared, arenas, strict=True):
            self._add_layout(sibling)
            arena.pinned |= attach.pins_arena
        arena = arenas[0]
        self._prefer_node(arena, attach.node)
        if self._config.populate_pool:
            self._populated.put_nowait(arena)
        if self._reporter is not None and not layout.is_opaque:
            self._reporter.reporter.name_model(layout.model)
        return Attached(self._name, arena.num_slots, arena.stride_bytes, arena.header_bytes, self._epoch), arenas

    def _prefer_node(self, arena: Arena, node: int | None) -> None:
        """Take the arena's memory from a NUMA node before anything else touches it."""
        try:
            if node is not None:
                arena.prefer_node(node)
        except OSError as error:
            _log.warning("arena.node_not_preferred", node=node, error=error.strerror)

    def _add_layout(self, layout: Layout) -> None:
        self._layouts.add_native(layout)
        if layout.is_opaque:
            self._unreported.add(layout.fingerprint)
        elif self._reporter is not None:
            self._reporter.reporter.add_layout(layout)

    def _on_attached(self, engine: EngineConnection) -> None:
        if self._engines.workers(engine.instance):
            pending, self._pending_claims = self._pending_claims, []
            for scheduler, message in pending:
                self._on_message(scheduler, message)

    def _on_message(self, engine: EngineConnection, message: Message) -> None:
        workers = self._engines.workers(engine.instance)
        if isinstance(message, Send | Receive) and not workers:
            self._pending_claims.append((engine, message))
        elif isinstance(message, Send):
            self._outbound.open(engine, workers, message)
        elif isinstance(message, Receive):
            self._inbound.claim(engine, arenas_of(workers), message)
        elif isinstance(message, Store | Lookup | FindBlocks | Hold):
            self._prefix_store.on_message(engine, workers, message)
        elif isinstance(message, Heartbeat):
            engine.post(Alive(message.number, self._inbound.claims(engine)))
        elif isinstance(message, Promised):
            if self._reporter is not None:
                self._reporter.on_promise(message)
        elif isinstance(message, Forget):
            # Includes blocks on their way here, and from here to other nodes.
            self._copies.forget(message.model)
            self._inbound.forget(message.model)
            self._prefix_store.forget(engine, message)
        elif isinstance(message, Release | Cancel):
            self._on_end(engine, message)

    def _on_end(self, engine: EngineConnection, message: Release | Cancel) -> None:
        """End an engine's part of a transfer. Another engine may have the other part of a transfer within this node."""
        self._drop_claims(lambda scheduler, claim: (scheduler, claim.transfer_id) == (engine, message.transfer_id))
        self._prefix_store.end(message.transfer_id, engine.instance)
        self._inbound.release(message.transfer_id, engine.instance)
        if isinstance(message, Cancel):
            self._outbound.engine_done(message.transfer_id, engine.instance)

    def _drop_claims(self, is_meant: Callable[[EngineConnection, Send | Receive], bool]) -> None:
        self._pending_claims = [pair for pair in self._pending_claims if not is_meant(*pair)]

    def _on_ring_written(self, worker: EngineConnection) -> None:
        entries, now = worker.ring.drain() if worker.ring else [], time.monotonic()
        for entry in entries if worker.is_writer else ():
            self._outbound.on_ring(worker, entry, now=now)
            self._prefix_store.on_ring(worker, entry)

    def _on_lost(self, engine: EngineConnection) -> None:
        self._drop_claims(lambda scheduler, _: scheduler is engine)
        is_last = not self._engines.has_instance(engine.instance)
        self._outbound.engine_lost(engine, is_last=is_last)
        self._prefix_store.engine_lost(engine, is_last=is_last)
        self._inbound.engine_lost(engine)

    # Events from the threads of links, receiver and SSD, passed to the event loop

    def _call_on_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        # The loop is closed once the agent has stopped.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def _on_link_event(self, event: SendEvent) -> None:
        self._outbound.on_event(event)
        self._copies.on_event(event)

    def _in_background(self, work: Callable[[], None], then: Callable[[bool], None]) -> None:
        """Run `work` in a thread, then call `then` on the loop with whether it succeeded."""

        def ended(future: asyncio.Future[None]) -> None:
            if not future.cancelled():
                if error := future.exception():
                    _log.error("agent.background_work_failed", message=repr(error))
                then(error is None)

        assert self._loop is not None
        self._loop.run_in_executor(None, work).add_done_callback(ended)

    # Reports to the managers

    def _on_pool_change(self, change: PoolChange) -> None:
        if self._ssd is not None:
            self._ssd.offer(change)
        self._report_change(change)

    def _report_change(self, change: PoolChange) -> None:
        if self._reporter is not None and change.layout not in self._unreported:
            self._reporter.reporter.publish((change,))

    def _report_timing(self, timing: TransferTiming) -> None:
        if self._reporter is not None:
            self._reporter.reporter.note_timing(timing)

    def _report_end(self, end: CopyEnd) -> None:
        if self._reporter is not None:
            self._reporter.reporter.note_copy_end(end)

    # Status pages, called from the status server's threads

    def _documents(self) -> dict[str, Callable[[], Any]]:
        return {
            "/healthz": lambda: {"status": "ok", "name": self._name},
            "/status": self._status_page,
            "/transfers": self._transfer_log.to_list,
        }

    def _status_page(self) -> dict[str, Any]:
        return {
            "name": self._name,
            "encrypted": self._certificates is not None,
            "sending": len(self._outbound),
            "copying": len(self._copies),
            "receiving": len(self._inbound),
            "prefix_store": len(self._prefix_store),
            "pending_claims": len(self._pending_claims),
            **pool_page(self._pool, self._ssd),
            "engines": [connection.name for connection in self._engines.connections],
            "reverse_connections": [asdict(connection) for connection in self._receiver.reverse_dials()],
            "links": [asdict(stats) for stats in self._links.stats()],
            "reporting": asdict(self._reporter.reporter.status) if self._reporter else None,
        }
