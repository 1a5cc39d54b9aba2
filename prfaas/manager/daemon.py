"""One manager process: record, world, servers, and the order in which they start and end."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from typing import TYPE_CHECKING, Any

from prfaas import logs, metrics
from prfaas.errors import MissingExtraError, RecordUnreachable
from prfaas.index.segments import digest_of_node
from prfaas.index.store.redis_store import Keys, RedisStore
from prfaas.manager.api.gauges import Gauges
from prfaas.manager.api.grpc import GrpcServer
from prfaas.manager.api.http import HttpServer, Views
from prfaas.manager.api.indexer import EngineIndexer, IndexerPages
from prfaas.manager.api.service import Service
from prfaas.manager.config import ManagerConfig
from prfaas.manager.dashboard.feed import Feed
from prfaas.manager.dashboard.overview import Overview
from prfaas.manager.dashboard.pages import DashboardPages, Solver
from prfaas.manager.operations.commands import Copies, PoolOrders
from prfaas.manager.operations.operations import Operations
from prfaas.manager.operations.rebalancer import Rebalancer
from prfaas.manager.operations.roles import RoleOrders
from prfaas.manager.planning.link_probes import LinkProbes
from prfaas.manager.planning.paths import Paths
from prfaas.manager.record.embedded_redis import EmbeddedRedis
from prfaas.manager.record.replication import Replication
from prfaas.manager.routing.router import RequestRouter
from prfaas.manager.state.holdings import holdings
from prfaas.manager.state.sessions import SessionRecord
from prfaas.manager.state.world import World
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.rpc.tasks import cancel_tasks, restarting_task
from prfaas.transport.net.tls_proxy import INNER, tls_proxy_for

if TYPE_CHECKING:
    from prfaas.manager.planning.planner import Planner

_TICK_SECONDS = 0.25
_LOAD_SECONDS = 60.0  # after so long without the record the manager serves what its agents tell it
_SWEPT_CELLS_PER_TICK = 200

log = logs.get("manager")


class Manager:
    """A running manager. `start`, then `close`; `run` does both around a wait for its cancellation."""

    def __init__(self, config: ManagerConfig, secret: bytes) -> None:
        self._config = config
        self._redis = None if config.redis_url else EmbeddedRedis(config.redis_directory)
        url = self._redis.url if self._redis else config.redis_url
        self.store = RedisStore(url, keys=Keys(config.redis_namespace))
        self.world = World(expiry_seconds=config.expiry_seconds, clock=time.monotonic)
        self._session_record = SessionRecord(self.store, expiry_seconds=config.session_seconds)
        self.replication = Replication(
            self.store,
            self.world,
            lease_seconds=config.lease_seconds,
            forget_seconds=config.forget_seconds,
            takes_plans=config.deployment is not None,
        )
        self.copies = Copies(
            secret=secret,
            clock=time.monotonic,
            wall_clock=time.time,
            max_per_caller=config.max_copies_per_caller,
        )
        self._rebalancer = Rebalancer(config, world=self.world, copies=self.copies, writes=self.replication.writes)
        self.paths = Paths(self.world, clock=time.monotonic)
        self.routing = RequestRouter(
            config,
            world=self.world,
            paths=self.paths,
            secret=secret,
            clock=time.monotonic,
            wall_clock=time.time,
            save_session=self._session_record.save,
            note=self._rebalancer.note,
        )
        self.service = Service(
            name=config.name,
            world=self.world,
            routing=self.routing,
            clock=time.monotonic,
            note=self._rebalancer.note,
        )
        self._planner = self._make_planner()
        self._link_probes = LinkProbes(
            config,
            world=self.world,
            paths=self.paths,
            secret=secret,
            writes=self.replication.writes,
            num_requests=lambda: self.routing.traffic.num_requests,
            clock=time.monotonic,
            wall_clock=time.time,
        )
        pool_orders = PoolOrders()
        self._grpc = GrpcServer(
            config,
            secret=secret,
            service=self.service,
            world=self.world,
            replication=self.replication,
            session_record=self._session_record,
            copies=self.copies,
            pool_orders=pool_orders,
            link_probes=self._link_probes,
            operations=self._operations(pool_orders),
        )
        gauges = Gauges(self.world, paths=self.paths, routing=self.routing, replication=self.replication)
        views = Views(
            refresh_metrics=gauges.refresh,
            is_ready=lambda: self.is_ready,
            state=self._state,
            digests=self._digests,
            pool=lambda: holdings(self.world),
            hot=self._rebalancer.hot,
            plan=self._plan,
            decisions=self.routing.decisions,
            ppd_table=self.routing.ppd_table.to_dict,
        )
        self._feed = Feed(self._overview())
        solver = Solver(self._planner.form, self._planner.prepared) if self._planner else None
        self._pages_door = tls_proxy_for(
            config.http_listen,
            config.certificates(speaks=("http/1.1",)),
            setting="http_listen",
            allows_plaintext=config.insecure_plaintext,
            refused=lambda reason: metrics.MANAGER_TLS_REFUSALS.labels(port="pages", reason=reason).inc(),
        )
        self._engine_indexer = EngineIndexer()
        indexer_pages = IndexerPages(self.world.index, self._engine_indexer)
        self._http = HttpServer(
            INNER if self._pages_door else config.http_listen,
            views,
            DashboardPages(self._feed, solver),
            further=indexer_pages.routes() if config.engine_indexer else (),
        )
        self._background: list[asyncio.Task[None]] = []
        self.is_ready = False

    def _operations(self, pool_orders: PoolOrders) -> Operations:
        role_orders = RoleOrders(
            self.world,
            replication=self.replication,
            is_automatic=self._planner is not None and self._config.role_changes == "apply",
            clock=time.monotonic,
        )
        return Operations(
            self._config,
            world=self.world,
            replication=self.replication,
            copies=self.copies,
            rebalancer=self._rebalancer,
            pool_orders=pool_orders,
            role_orders=role_orders,
        )

    def _make_planner(self) -> Planner | None:
        """Who solves for t, where there is a deployment to solve.

        Raises:
            ConfigError: its file cannot be used.
            MissingExtraError: the solver is not installed.
        """
        if self._config.deployment is None:
            return None
        try:
            from prfaas.manager.planning.planner import Planner  # noqa: PLC0415  # the extra `solve`
        except ModuleNotFoundError as error:
            raise MissingExtraError(
                f"deployment: {error.name} is not installed; run: pip install 'prfaas[solve]'"
            ) from error
        planner = Planner(
            self._config,
            world=self.world,
            paths=self.paths,
            writes=self.replication.writes,
            traffic=self.routing.traffic,
            clock=time.monotonic,
            wall_clock=time.time,
        )
        self.routing.path_cost = planner.path_cost
        return planner

    def _overview(self) -> Overview:
        return Overview(
            name=self._config.name,
            started_at=time.time(),
            world=self.world,
            paths=self.paths,
            routing=self.routing,
            rebalancer=self._rebalancer,
            outcomes=self.service.outcomes,
            can_plan=self._planner is not None,
            is_stale=lambda: self.replication.is_stale,
            clock=time.monotonic,
            wall_clock=time.time,
        )

    @property
    def address(self) -> str:
        """Where gRPC listens."""
        return self._grpc.address

    @property
    def http_address(self) -> str:
        return self._pages_door.address if self._pages_door else self._http.address

    @property
    def redis(self) -> EmbeddedRedis | None:
        return self._redis

    async def start(self) -> None:
        """Start everything; returns when the record is read and questions are answered.

        Raises:
            ConfigError: an address is taken or not allowed, or Redis is unfit.
            MissingExtraError: there is no redis-server to embed.
        """
        if self._redis is not None:
            await self._redis.start()
        await self._check_redis()
        await self._http.start()
        if self._pages_door is not None:
            self._pages_door.start(self._http.address)
        self._grpc.bind()
        reachable_at = self._config.advertise or self._grpc.address
        self.replication.start(owner=f"{reachable_at} {self._config.name}-{secrets.token_hex(4)}")
        await self._wait_for_record()
        await self._grpc.start()
        await self._grpc.set_serving(True)
        self._background = [
            restarting_task(self._tick, name="tick", ended=metrics.MANAGER_TASKS_ENDED),
            restarting_task(self._session_record.run, name="sessions", ended=metrics.MANAGER_TASKS_ENDED),
            restarting_task(self._feed.run, name="dashboard", ended=metrics.MANAGER_TASKS_ENDED),
        ]
        if self._config.rebalance_bytes_per_second:
            rebalancing = restarting_task(self._rebalancer.run, name="rebalancing", ended=metrics.MANAGER_TASKS_ENDED)
            self._background.append(rebalancing)
        if self._planner is not None:
            self._background.append(
                restarting_task(self._planner.run, name="planning", ended=metrics.MANAGER_TASKS_ENDED)
            )
        self.is_ready = True
        log.info(
            "manager.started", address=self.address, http=self.http_address, embedded_redis=self._redis is not None
        )

    async def _check_redis(self) -> None:
        try:
            await self.store.check()
        except RecordUnreachable as error:
            log.warning("record.unreachable", error=str(error))

    async def _wait_for_record(self) -> None:
        try:
            async with asyncio.timeout(_LOAD_SECONDS):
                await self.replication.has_loaded.wait()
        except TimeoutError:
            log.warning("record.not_loaded", seconds=_LOAD_SECONDS)

    async def run(self) -> None:
        """Serve until cancelled."""
        await self.start()
        try:
            await asyncio.Event().wait()
        finally:
            await self.close()

    async def close(self) -> None:
        """NOT_SERVING, drain, give the leases back, stop Redis when it is ours."""
        self.is_ready = False
        self.world.stop_clock()
        await self._grpc.close()
        await cancel_tasks(self._background)
        await self.replication.close()
        if self._pages_door is not None:
            await self._pages_door.close()
        await self._http.close()
        await self._engine_indexer.close()
        await self.store.close()
        if self._redis is not None:
            await self._redis.close()
        log.info("manager.stopped")

    async def _tick(self) -> None:
        while True:
            self.world.refresh()
            self.paths.step()
            if self._planner is not None:
                self._link_probes.step()
            self.service.outcomes.expire()
            self.copies.expire({member.node.name for member in self.world.live()})
            self.world.index.sweep(_SWEPT_CELLS_PER_TICK)
            self._engine_indexer.sweep(_SWEPT_CELLS_PER_TICK)
            await asyncio.sleep(_TICK_SECONDS)

    def _state(self) -> pb.StateSnapshot:
        return self.service.state(index_stale=self.replication.is_stale)

    def _plan(self) -> dict[str, Any]:
        plan = self.world.plan
        return {"threshold_tokens": self.routing.threshold_tokens, "plan": json.loads(plan.to_json()) if plan else None}

    def _digests(self) -> dict[str, str]:
        names = [member.node.name for member in self.world.live()]
        return {name: str(digest_of_node(self.world.index.digests(name))) for name in names}
