"""The engines that this router knows: their health, their load, their models."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import aiohttp

from prfaas import logs
from prfaas.router.config import ClusterConfig, InstanceConfig, RouterConfig
from prfaas.scheduler.snapshot import InstanceState, Snapshot
from prfaas.types import AgentName, ClusterKind, ClusterName, InstanceId, InstanceRole

PROBE_SECONDS = 5.0  # an engine in the middle of a long step answers late
_log = logs.get("router.fleet")


@dataclass(eq=False)
class Instance:
    """One engine."""

    config: InstanceConfig
    cluster: ClusterName
    cluster_kind: ClusterKind
    role: InstanceRole
    healthy: bool = False
    num_requests: int = 0
    base_models: frozenset[str] = field(default_factory=frozenset)  # served names, adapters left out
    identity: str = ""  # the first served name, by which connectors name the weights

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """One request more while the block runs."""
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1

    def failed(self, reason: str) -> None:
        """It refused a connection: nobody asks it before the next good probe."""
        if self.healthy:
            _log.warning("instance.down", instance=self.config.name, reason=reason)
        self.healthy = False

    def state(self) -> InstanceState:
        return InstanceState(
            instance=InstanceId(self.config.name),
            cluster=self.cluster,
            cluster_kind=self.cluster_kind,
            role=self.role,
            agent=AgentName(self.config.agent),
            healthy=self.healthy,
            num_requests=self.num_requests,
        )


class Fleet:
    """Every instance, probed in the background."""

    def __init__(self, config: RouterConfig, session: aiohttp.ClientSession) -> None:
        self._config = config
        self._session = session
        self._instances = {instance.config.name: instance for instance in _instances(config.clusters)}

    def __getitem__(self, name: InstanceId) -> Instance:
        return self._instances[name]

    def __iter__(self) -> Iterator[Instance]:
        return iter(self._instances.values())

    def snapshot(self) -> Snapshot:
        states = tuple(instance.state() for instance in self._instances.values())
        return Snapshot(threshold_tokens=self._config.threshold_tokens, instances=states)

    def decodes(self) -> bool:
        """Whether anybody can answer."""
        return any(instance.state().decodes for instance in self)

    async def probe_forever(self) -> None:
        """Ask every engine for its health, and for its models when it comes up."""
        while True:
            await asyncio.gather(*(self._probe(instance) for instance in self))
            await asyncio.sleep(self._config.probe_interval)

    async def _probe(self, instance: Instance) -> None:
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                async with self._session.get(f"{instance.config.url}/health") as response:
                    healthy = response.status == 200
                if healthy and not (instance.healthy and instance.base_models):
                    await self._learn_models(instance)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError) as error:
            instance.failed(repr(error))
            return
        if healthy and not instance.healthy:
            _log.info("instance.up", instance=instance.config.name, models=sorted(instance.base_models))
        instance.healthy = healthy

    async def _learn_models(self, instance: Instance) -> None:
        async with self._session.get(f"{instance.config.url}/v1/models") as response:
            models = (await response.json())["data"]
        base = [model["id"] for model in models if not model.get("parent")]
        instance.base_models, instance.identity = frozenset(base), base[0]


def _instances(clusters: tuple[ClusterConfig, ...]) -> Iterator[Instance]:
    for cluster in clusters:
        kind: ClusterKind = "prfaas" if cluster.kind == "prfaas" else "pd"
        for config in cluster.instances:
            role: InstanceRole = (
                "prefill" if config.role == "prefill" else "decode" if config.role == "decode" else "both"
            )
            yield Instance(config, ClusterName(cluster.name), kind, role)
