"""The circuit breaker of one endpoint: after failures on end nobody asks it for a while, then one request tries."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

import aiohttp
import msgspec

from prfaas import logs, metrics
from prfaas.router.config import ClusterConfig, RouterConfig
from prfaas.scheduler.placement import choose_instance
from prfaas.scheduler.snapshot import InstanceState, LocalPolicy, RequestFacts, Snapshot, WithoutPrefill
from prfaas.types import AgentName, ClusterKind, ClusterName, InstanceId, InstanceRole


@dataclass
class CircuitBreaker:
    """Times are seconds on a clock that only goes forward. `limit` failures on end open it; 0: nothing does."""

    limit: int = 0
    seconds: float = 0.0
    failures: int = 0  # on end
    closed_at: float = 0.0  # before this it is open

    def is_open(self, now: float) -> bool:
        return now < self.closed_at

    def succeeded(self) -> None:
        """A request was answered."""
        self.failures, self.closed_at = 0, 0.0

    def failed(self, now: float) -> bool:
        """Return a request was not; whether that opened it. Once it was open, the next failure opens it again."""
        self.failures += 1
        if not self.limit or self.failures < self.limit or self.is_open(now):
            return False
        self.closed_at = now + self.seconds
        return True


PROBE_SECONDS = 5.0  # an engine in the middle of a long step answers late
_log = logs.get("router.fleet")


class _Model(msgspec.Struct):
    id: str
    parent: str | None = None  # of an adapter: the model below it


class _Models(msgspec.Struct):
    data: list[_Model]


_MODELS = msgspec.json.Decoder(_Models)


@dataclass(frozen=True)
class InstanceAddress:
    """Where an instance is and what stands beside it."""

    name: InstanceId
    url: str
    role: InstanceRole
    agent: AgentName
    wire: str  # host:port of the agent's wire
    cluster: ClusterName
    cluster_kind: ClusterKind


@dataclass(eq=False)
class Instance:
    """One engine."""

    address: InstanceAddress
    healthy: bool = False
    num_requests: int = 0  # under way
    num_tokens: int = 0  # of their prompts
    models: frozenset[str] = field(default_factory=frozenset)  # every served name, adapters too
    base_models: frozenset[str] = field(default_factory=frozenset)  # without the adapters
    identity: str = ""  # the first served name, by which connectors name the weights
    renders: bool = True  # as far as known, it turns chats into token ids just as it would answer them
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)

    @property
    def url(self) -> str:
        return self.address.url

    @contextlib.contextmanager
    def busy(self, num_tokens: int = 0) -> Iterator[None]:
        """One request more, with a prompt of so many tokens, while the block runs."""
        self.num_requests += 1
        self.num_tokens += num_tokens
        try:
            yield
        finally:
            self.num_requests -= 1
            self.num_tokens -= num_tokens

    @property
    def is_asked(self) -> bool:
        """Return whether requests go there: it is healthy, and has not just failed several."""
        return self.healthy and not self.breaker.is_open(time.monotonic())

    def failed(self, reason: str) -> None:
        """It refused a connection: nobody asks it before the next good probe."""
        if self.healthy:
            _log.warning("instance.down", instance=self.address.name, reason=reason)
        self.healthy = False

    def failed_leg(self, reason: str) -> None:
        """It took a request and did not answer it."""
        if self.breaker.failed(time.monotonic()):
            metrics.BREAKERS_OPENED.labels(instance=self.address.name).inc()
            seconds = self.breaker.seconds
            _log.warning("instance.left_alone", instance=self.address.name, reason=reason, seconds=seconds)

    def state(self, *, left_alone: bool = True) -> InstanceState:
        """As decisions see it; `left_alone`: while it is, it counts as not healthy."""
        its = self.address
        return InstanceState(
            instance=its.name,
            cluster=its.cluster,
            cluster_kind=its.cluster_kind,
            role=its.role,
            agent=its.agent,
            healthy=self.is_asked if left_alone else self.healthy,
            num_requests=self.num_requests,
        )


@dataclass(frozen=True)
class StandalonePolicy:
    """What a router goes by that decides alone: its own settings, or what managers said last."""

    local_policy: LocalPolicy
    without_prefill: WithoutPrefill


class Fleet:
    """Every instance that may be asked, probed in the background."""

    def __init__(self, config: RouterConfig, session: aiohttp.ClientSession) -> None:
        self.threshold_tokens = config.threshold_tokens
        self.counts_all = config.local_policy != "decode"
        self.policy_alone = StandalonePolicy(config.local_policy, config.without_prefill)
        self.resting: frozenset[InstanceId] = frozenset()  # get nothing new, as managers say
        self._config = config
        self._session = session
        self._instances: dict[InstanceId, Instance] = {}
        self._changed = asyncio.Event()
        self.update(_addresses(config.clusters))

    def __getitem__(self, name: InstanceId) -> Instance:
        return self._instances[name]

    def __contains__(self, name: InstanceId) -> bool:
        return name in self._instances

    def __iter__(self) -> Iterator[Instance]:
        return iter(list(self._instances.values()))

    def update(self, addresses: Iterable[InstanceAddress]) -> None:
        """These are the instances; those at the same URL keep what is known of them, new ones are probed at once."""
        known = self._instances
        self._instances = {address.name: self._at(address, known.get(address.name)) for address in addresses}
        self._changed.set()

    def _at(self, address: InstanceAddress, before: Instance | None) -> Instance:
        if before is not None and before.url == address.url:  # another role is no other engine
            before.address = address
            return before
        its = self._config
        return Instance(address, breaker=CircuitBreaker(its.breaker_failures, its.breaker_seconds))

    def snapshot(
        self, model: str | None = None, *, excluded: Collection[InstanceId] = (), is_alone: bool = False
    ) -> Snapshot:
        """What decisions are made from: the instances that serve `model`, or all when none does, so that an engine says
        so; decode instances are those of this router's own cluster, if it has one. None rests, while others decode that
        are not `excluded`; when all of those are being left alone for their failures, they are asked all the same.
        `is_alone`: no manager answers, so that their policy is kept as far as it can be.
        """
        own = self._config.cluster
        serving = [instance for instance in self._instances.values() if model in instance.models] or list(
            self._instances.values()
        )
        serving = [
            its for its in serving if not own or its.address.cluster == own or its.address.cluster_kind == "prfaas"
        ]
        states = [instance.state() for instance in serving if instance.address.name not in self.resting]
        if not any(state.decodes and state.instance not in excluded for state in states):
            states = [instance.state(left_alone=False) for instance in serving]
        its = self.policy_alone if is_alone else self._config
        return Snapshot(
            self.threshold_tokens,
            tuple(states),
            local_policy=its.local_policy,
            without_prefill=its.without_prefill,
        )

    def is_base_model(self, model: str | None) -> bool:
        """Return whether it is no adapter and no unknown name; without one an engine takes its base model."""
        return model is None or any(model in instance.base_models for instance in self._instances.values())

    def must_count(self, max_prompt_tokens: int) -> bool:
        """Return whether a prompt of at most so many tokens may be prefilled elsewhere than where it is decoded."""
        return max_prompt_tokens > self.threshold_tokens or self.counts_all

    def any_decode(self, model: str | None = None) -> Instance | None:
        """Return a decode instance for a request whose tokens do not matter; None when nobody is ready."""
        chosen = choose_instance((state for state in self.snapshot(model).instances if state.decodes), RequestFacts(0))
        return self._instances[chosen.instance] if chosen else None

    async def probe_forever(self) -> None:
        """Ask every engine for its health, and for its models when it comes up."""
        while True:
            self._changed.clear()
            await asyncio.gather(*(self._probe(instance) for instance in self))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.probe_interval):
                    await self._changed.wait()

    async def _probe(self, instance: Instance) -> None:
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                async with self._session.get(f"{instance.url}/health") as response:
                    healthy = response.status == 200
                if healthy and not (instance.healthy and instance.models):
                    await self._learn_models(instance)
        except (aiohttp.ClientError, OSError, ValueError, LookupError) as error:
            instance.failed(repr(error))
            return
        if healthy and not instance.healthy:
            _log.info("instance.up", instance=instance.address.name, models=sorted(instance.base_models))
        instance.healthy = healthy

    async def _learn_models(self, instance: Instance) -> None:
        async with self._session.get(f"{instance.url}/v1/models") as response:
            models = _MODELS.decode(await response.read()).data
        base = [model.id for model in models if not model.parent]
        instance.models = frozenset(model.id for model in models)
        instance.base_models, instance.identity = frozenset(base), base[0]


def _addresses(clusters: tuple[ClusterConfig, ...]) -> Iterator[InstanceAddress]:
    for cluster in clusters:
        for instance in cluster.instances:
            yield InstanceAddress(
                name=InstanceId(instance.name),
                url=instance.url,
                role=instance.role,
                agent=AgentName(instance.agent),
                wire=instance.wire,
                cluster=ClusterName(cluster.name),
                cluster_kind=cluster.kind,
            )


def role_of(text: str) -> InstanceRole:
    """Return the role that a manager names; a router can do nothing with another one, so it is `both`."""
    return "prefill" if text == "prefill" else "decode" if text == "decode" else "both"


def kind_of(text: str) -> ClusterKind:
    return "prfaas" if text == "prfaas" else "pd"
