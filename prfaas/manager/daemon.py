"""Manager process: creates the parts of a manager, starts them in order, and stops them."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from google.protobuf.json_format import MessageToDict

from prfaas import logs, metrics
from prfaas.errors import MissingExtraError, RecordUnreachable
from prfaas.index.query import MatchResult, Query
from prfaas.index.segments import digest_of_node
from prfaas.index.store.redis_store import Keys, RedisStore
from prfaas.manager.api.gauges import refresh_gauges
from prfaas.manager.api.grpc import GrpcServer
from prfaas.manager.api.http import HttpServer
from prfaas.manager.api.service import Service
from prfaas.manager.config import ManagerConfig
from prfaas.manager.dashboard.cache_hits import CacheHits
from prfaas.manager.dashboard.feed import Feed
from prfaas.manager.dashboard.overview import Overview
from prfaas.manager.dashboard.pages import DashboardPages
from prfaas.manager.operations.commands import Copies
from prfaas.manager.operations.operations import Operations
from prfaas.manager.operations.rebalancer import Rebalancer
from prfaas.manager.planning.paths import Paths
from prfaas.manager.record.cluster_writer import FORGET_SECONDS, LEASE_SECONDS
from prfaas.manager.record.embedded_redis import EmbeddedRedis
from prfaas.manager.record.replication import Replication
from prfaas.manager.routing.router import RequestRouter
from prfaas.manager.state.running_clock import RunningClock
from prfaas.manager.state.world import World
from prfaas.rpc.tasks import cancel_tasks, restarting_task
from prfaas.transport.net.tls import Certificates
from prfaas.transport.net.tls_proxy import INNER, tls_proxy_for

if TYPE_CHECKING:
    from prfaas.manager.planning.planner import Planner

_TICK_SECONDS = 0.25
_LOAD_SECONDS = 60.0  # After so long without the record, the manager serves what agents report.
DIGEST_SECONDS = 10.0  # Period of the agents' digests.
STOP_SECONDS = 5.0  # Calls and streams in progress may take so long to end.
_SWEPT_RUNS_PER_TICK = 1000  # They take about 3 ms.

log = logs.get("manager")


class Manager:
    """A running manager. Call `start`, then `close`; `run` does both around a wait for cancellation."""

    def __init__(
        self,
        config: ManagerConfig,
        secret: bytes,
        *,
        lease_seconds: float = LEASE_SECONDS,
        stop_seconds: float = STOP_SECONDS,
        digest_seconds: float = DIGEST_SECONDS,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._redis = None if config.redis_url else EmbeddedRedis(config.redis_directory)
        url = self._redis.url if self._redis else config.redis_url
        self.store = RedisStore(url, keys=Keys(config.redis_namespace))
        self._clock, self._wall_clock = RunningClock(time.monotonic), wall_clock
        self.world = World(
            expiry_seconds=config.expiry_seconds, silence_seconds=config.silence_seconds, clock=self._clock
        )
        self.replication = Replication(
            self.store,
            self.world,
            lease_seconds=lease_seconds,
            forget_seconds=max(FORGET_SECONDS, config.expiry_seconds),
            takes_plans=config.deployment is not None,
        )
        self.copies = Copies(secret=secret, clock=self._clock, wall_clock=self._wall_clock)
        self._rebalancer = Rebalancer(config, world=self.world, copies=self.copies, writes=self.replication.writes)
        self._cache_hits = CacheHits(self.world.index, self._wall_clock)
        self.paths = Paths(self.world, clock=self._clock)
        self.routing = RequestRouter(
            config,
            world=self.world,
            paths=self.paths,
            secret=secret,
            clock=self._clock,
            wall_clock=self._wall_clock,
            note=self._note_match,
        )
        self.service = Service(
            name=config.name, world=self.world, routing=self.routing, clock=self._clock, note=self._rebalancer.note
        )
        self._planner = self._make_planner()
        self._operations = Operations(
            config,
            world=self.world,
            replication=self.replication,
            copies=self.copies,
            rebalancer=self._rebalancer,
            changes_roles=self._planner is not None and config.role_changes == "apply",
        )
        self._grpc = GrpcServer(
            config,
            secret=secret,
            service=self.service,
            world=self.world,
            replication=self.replication,
            copies=self.copies,
            operations=self._operations,
            stop_seconds=stop_seconds,
            digest_seconds=digest_seconds,
        )
        self._make_http()
        self._background: list[asyncio.Task[None]] = []
        self.is_ready = False

    def _note_match(self, query: Query, answer: MatchResult) -> None:
        self._rebalancer.note(query, answer)
        self._cache_hits.note(query, answer)

    def _make_planner(self) -> Planner | None:
        """Create the planner if there is a deployment to solve.

        Raises:
            ConfigError: the deployment file cannot be used.
            MissingExtraError: the solver is not installed.
        """
        if self._config.deployment is None:
            return None
        try:
            # The planner needs the extra `solve`.
            from prfaas.manager.planning.planner import Planner  # noqa: PLC0415
        except ModuleNotFoundError as error:
            raise MissingExtraError(
                f"deployment: {error.name} is not installed; run: pip install 'prfaas[site]'"
            ) from error
        planner = Planner(
            self._config,
            world=self.world,
            paths=self.paths,
            writes=self.replication.writes,
            traffic=self.routing.traffic,
            clock=self._clock,
            wall_clock=self._wall_clock,
        )
        self.routing.path_cost = planner.path_cost
        return planner

    def _make_http(self) -> None:
        config = self._config
        overview = Overview(
            name=config.name,
            started_at=self._wall_clock(),
            world=self.world,
            paths=self.paths,
            routing=self.routing,
            rebalancer=self._rebalancer,
            outcomes=self.service.outcomes,
            cache_hits=self._cache_hits,
            actions=self._operations.operators.actions,
            planner=self._planner,
            is_stale=lambda: self.replication.is_stale,
            clock=self._clock,
            wall_clock=self._wall_clock,
        )
        self._feed = Feed(overview)
        self._http_proxy = tls_proxy_for(
            config.http_listen,
            Certificates.of(config.tls, alpn_protocols=("http/1.1",)),
            setting="http_listen",
            allows_plaintext=config.insecure_plaintext,
            refused=lambda reason: metrics.MANAGER_TLS_REFUSALS.labels(port="pages", reason=reason).inc(),
        )
        self._http = HttpServer(
            INNER if self._http_proxy else config.http_listen,
            refresh_metrics=partial(
                refresh_gauges, self.world, paths=self.paths, routing=self.routing, replication=self.replication
            ),
            is_ready=lambda: self.is_ready,
            json_pages={
                "/state": self._state,
                "/digests": self._digests,
                "/pool": self.world.holdings,
                "/hot": self._rebalancer.hot,
                "/plan": self._plan,
                "/ppd": self.routing.ppd_table.to_dict,
            },
            decision=self._decision,
            dashboard=DashboardPages(self._feed, self.replication.owners),
        )

    @property
    def address(self) -> str:
        """Return the address of the gRPC server."""
        return self._grpc.address

    @property
    def http_address(self) -> str:
        return self._http_proxy.address if self._http_proxy else self._http.address

    @property
    def redis(self) -> EmbeddedRedis | None:
        return self._redis

    async def start(self) -> None:
        """Start all parts. Returns once the record is read and calls are answered.

        Raises:
            ConfigError: an address is taken or not allowed, or Redis is unfit.
            MissingExtraError: there is no redis-server to embed.
        """
        if self._redis is not None:
            await self._redis.start()
        try:
            await self.store.check()
        except RecordUnreachable as error:
            log.warning("record.unreachable", error=str(error))
        await self._http.start()
        if self._http_proxy is not None:
            self._http_proxy.start(self._http.address)
        self._grpc.bind()
        reachable_at = self._config.advertise or self._grpc.address
        page = f"{'https' if self._http_proxy else 'http'}://{self.http_address}/"
        self.replication.start(owner=f"{reachable_at} {self._config.name}-{secrets.token_hex(4)} {page}")
        try:
            async with asyncio.timeout(_LOAD_SECONDS):
                await self.replication.has_loaded.wait()
        except TimeoutError:
            log.warning("record.load_timed_out", seconds=_LOAD_SECONDS)
        await self._grpc.start()
        await self._grpc.set_serving(True)
        work = {"tick": self._tick, "dashboard": self._feed.run}
        if self._config.rebalance_bytes_per_second:
            work["rebalancing"] = self._rebalancer.run
        if self._planner is not None:
            work["planning"] = self._planner.run
        ended = metrics.MANAGER_TASKS_ENDED
        self._background = [restarting_task(run, name=name, ended=ended) for name, run in work.items()]
        self.is_ready = True
        log.info(
            "manager.started", address=self.address, http=self.http_address, embedded_redis=self._redis is not None
        )

    async def run(self) -> None:
        """Serve until cancelled."""
        await self.start()
        try:
            await asyncio.Event().wait()
        finally:
            await self.close()

    async def close(self) -> None:
        """Report NOT_SERVING, finish the calls in progress, release the leases, and stop an embedded Redis."""
        self.is_ready = False
        self.world.stop_clock()
        await self._grpc.close()
        await cancel_tasks(self._background)
        await self.replication.close()
        if self._http_proxy is not None:
            await self._http_proxy.close()
        await self._http.close()
        await self.store.close()
        if self._redis is not None:
            await self._redis.close()
        log.info("manager.stopped")

    async def _tick(self) -> None:
        while True:
            self._clock()
            self.world.refresh()
            self.paths.step()
            self.service.outcomes.expire()
            self.copies.expire({member.node.name for member in self.world.heard()})
            self.world.index.sweep(_SWEPT_RUNS_PER_TICK)
            await asyncio.sleep(_TICK_SECONDS)

    def _state(self) -> dict[str, Any]:
        state = self.service.state(index_stale=self.replication.is_stale)
        return MessageToDict(state, preserving_proto_field_name=True)

    def _plan(self) -> dict[str, Any]:
        plan = self.world.plan
        return {"threshold_tokens": self.routing.threshold_tokens, "plan": json.loads(plan.to_json()) if plan else None}

    def _decision(self, decision_id: bytes) -> dict[str, Any] | None:
        recorded, outcome = self.routing.decisions.get(decision_id), self.service.outcomes.get(decision_id)
        return None if recorded is None else recorded.document() | {"ended": asdict(outcome) if outcome else None}

    def _digests(self) -> dict[str, str]:
        names = [member.node.name for member in self.world.live()]
        return {name: str(digest_of_node(self.world.index.digests(name))) for name in names}
