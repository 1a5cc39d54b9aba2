"""Fleet of engines: their addresses, health and load, and a circuit breaker for each."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
import msgspec

from prfaas import logs, metrics
from prfaas.router.config import ClusterConfig, RouterConfig
from prfaas.scheduler.placement import choose_instance
from prfaas.scheduler.snapshot import InstanceState, RequestFacts, Snapshot
from prfaas.types import AgentName, ClusterKind, ClusterName, InstanceId, InstanceRole, LocalPolicy

STREAM_PATIENCE = 10  # A stream that has begun cannot move, so it ends only after this many times the usual silence.
# A timer that fires later says that this process itself stood still.
MAX_TIMER_DELAY_SECONDS = 0.5
BREAKER_FAILURES = 5  # Consecutive failures that open a circuit breaker.
BREAKER_SECONDS = 10.0  # Time that it stays open.
SECOND_CHECK_RATIO = 0.5  # Time for the answer to a second health check, relative to the first.
Leg = Literal["prefill", "decode", "stream"]  # A stream is a decode leg after its first byte.
Health = Literal["healthy", "unhealthy", "down", "silent", "unknown"]
_log = logs.get("router.fleet")


class _Model(msgspec.Struct):
    id: str
    parent: str | None = None  # Base model of an adapter.
    max_model_len: int = 0


class _Models(msgspec.Struct):
    data: list[_Model]


_MODELS = msgspec.json.Decoder(_Models)


class EngineSilent(Exception):
    """Engine that answers no health checks, and whose legs are better served elsewhere."""


@dataclass
class CircuitBreaker:
    """Stops requests to an endpoint after consecutive failures, then lets requests try it. `now` is monotonic seconds."""

    num_failures: int = 0
    closed_at: float = 0.0

    def is_open(self, now: float) -> bool:
        return now < self.closed_at

    def succeeded(self) -> None:
        """Note a request that was answered."""
        self.num_failures, self.closed_at = 0, 0.0

    def failed(self, now: float) -> bool:
        """Note a failure, and return whether it opened the breaker. After an opening each further failure opens it again."""
        self.num_failures += 1
        if self.num_failures < BREAKER_FAILURES or self.is_open(now):
            return False
        self.closed_at = now + BREAKER_SECONDS
        return True


@dataclass(frozen=True)
class InstanceAddress:
    """Address of an instance, and its place in the deployment. `wire` is the address (host:port) of its agent."""

    name: InstanceId
    url: str
    role: InstanceRole
    agent: AgentName
    wire: str
    cluster: ClusterName
    cluster_kind: ClusterKind


def addresses_of(node: Any) -> Iterator[InstanceAddress]:
    """Yield the instances of a node in a manager's state.

    An unknown role counts as `both`, an unknown kind of cluster as `pd`.
    """
    for engine in node.engines:
        yield InstanceAddress(
            name=InstanceId(engine.instance),
            url=engine.url,
            role="prefill" if engine.role == "prefill" else "decode" if engine.role == "decode" else "both",
            agent=AgentName(node.name),
            wire=node.wire_address,
            cluster=ClusterName(node.cluster),
            cluster_kind="prfaas" if node.cluster_kind == "prfaas" else "pd",
        )


@dataclass(eq=False)
class Instance:
    """State of one engine.

    `num_requests` and `num_tokens` count running requests and the tokens of their prompts.
    `silent_since` is when it began not to answer health checks; None while it answers.
    `models` are all served names, `base_models` those without adapters. `identity` is the first name, which stands for the
    weights in block hashes. `max_model_len` is its limit on prompt and answer; 0 if unknown.
    """

    address: InstanceAddress
    healthy: bool = False
    silent_since: float | None = None
    num_requests: int = 0
    num_tokens: int = 0
    models: frozenset[str] = field(default_factory=frozenset)
    base_models: frozenset[str] = field(default_factory=frozenset)
    identity: str = ""
    max_model_len: int = 0
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    heard_at: float = 0.0  # Monotonic time of the latest bytes of an answer.
    _watches: dict[asyncio.Timeout, Leg] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return self.address.url

    @contextlib.contextmanager
    def busy(self, num_tokens: int = 0) -> Iterator[None]:
        """Count one more request with a prompt of `num_tokens` while the block runs."""
        self.num_requests += 1
        self.num_tokens += num_tokens
        try:
            yield
        finally:
            self.num_requests -= 1
            self.num_tokens -= num_tokens

    @contextlib.asynccontextmanager
    async def watched(self, leg: Leg) -> AsyncIterator[None]:
        """Run a block that `end_legs` ends by EngineSilent if it ends this kind of leg."""
        watch = asyncio.timeout(None)
        try:
            async with watch:
                self._watches[watch] = leg
                yield
        except TimeoutError as error:
            if watch.expired():
                raise EngineSilent(f"{self.address.name} does not answer") from error
            raise
        finally:
            self._watches.pop(watch, None)

    def end_legs(self, *legs: Leg) -> None:
        """End the running legs of these kinds, because the engine does not answer."""
        now = asyncio.get_running_loop().time()
        for watch, leg in self._watches.items():
            if leg in legs:
                watch.reschedule(now)

    @property
    def is_available(self) -> bool:
        """Return whether it is healthy, answers, and has a closed circuit breaker."""
        return self.healthy and self.silent_since is None and not self.breaker.is_open(time.monotonic())

    def failed(self, reason: str) -> None:
        """Note a refused connection: the instance gets no requests before a health check succeeds."""
        if self.healthy:
            _log.warning("instance.went_down", instance=self.address.name, reason=reason)
        self.healthy = False

    def fell_silent(self) -> None:
        """Note a health check without an answer: the instance gets requests only if there is no other."""
        if self.silent_since is None:
            self.silent_since = time.monotonic()
            metrics.ENGINE_SILENCES.labels(engine=self.address.name).inc()
            _log.warning("instance.fell_silent", instance=self.address.name)

    def answered(self) -> None:
        """Note an answer to a health check."""
        if self.silent_since is not None:
            seconds = round(time.monotonic() - self.silent_since, 3)
            _log.info("instance.answers_again", instance=self.address.name, seconds=seconds)
        self.silent_since = None

    def failed_leg(self, reason: str) -> None:
        """Note a request that it took and did not answer."""
        if self.breaker.failed(time.monotonic()):
            _log.warning("instance.breaker_opened", instance=self.address.name, reason=reason, seconds=BREAKER_SECONDS)

    def state(self, *, is_last_resort: bool = False) -> InstanceState:
        """Return the instance as decisions see it. A silent one, or an open breaker, counts as healthy only as last resort."""
        address = self.address
        return InstanceState(
            instance=address.name,
            cluster=address.cluster,
            cluster_kind=address.cluster_kind,
            role=address.role,
            agent=address.agent,
            healthy=self.healthy if is_last_resort else self.is_available,
            num_requests=self.num_requests,
        )


@dataclass(frozen=True)
class FleetPolicy:
    """Policy of a router that decides alone: its own settings, or the last ones of a manager.

    `counts_all`: short prompts are tokenised too, because the policy may prefill them at another instance.
    """

    threshold_tokens: int
    local_policy: LocalPolicy
    counts_all: bool


class Fleet:
    """All instances, with health checks in the background. Instances in `resting` get no new requests.

    `is_stale`: the router has managers, and none of them has answered yet.
    """

    def __init__(self, config: RouterConfig, session: aiohttp.ClientSession) -> None:
        self.policy = FleetPolicy(config.threshold_tokens, config.local_policy, config.local_policy != "decode")
        self.resting: frozenset[InstanceId] = frozenset()
        self.is_stale = bool(config.managers)
        self._config = config
        self._session = session
        self._instances: dict[InstanceId, Instance] = {}
        self._changed = asyncio.Event()
        self._refused: set[InstanceAddress] = set()  # Logged once.
        self.update(addresses_of_clusters(config.clusters))

    def __getitem__(self, name: InstanceId) -> Instance:
        return self._instances[name]

    def __contains__(self, name: InstanceId) -> bool:
        return name in self._instances

    def __iter__(self) -> Iterator[Instance]:
        return iter(list(self._instances.values()))

    def update(self, addresses: Iterable[InstanceAddress]) -> None:
        """Replace the instances. An instance with an unchanged URL keeps its state; a new one is checked at once.

        With `tls`, an instance of another cluster whose legs would be plain text is left out.
        """
        known = self._instances
        self._instances = {}
        for address in addresses:
            if self._config.exposes_prompts(address.url, address.cluster, address.cluster_kind):
                if address not in self._refused:
                    _log.error("instance.plaintext_refused", instance=address.name, url=address.url)
                self._refused.add(address)
                continue
            instance = known.get(address.name)
            if instance is not None and instance.url == address.url:
                instance.address = address
            else:
                instance = Instance(address)
            self._instances[address.name] = instance
        self._changed.set()

    def snapshot(self, model: str | None = None, *, excluded: Collection[InstanceId] = ()) -> Snapshot:
        """Return the input of a decision.

        It has the instances that serve `model`, or all if none does, so that an engine rejects the name. With a cluster of
        its own, the router uses only that cluster's decode instances, unless requests may overflow. Resting and silent
        instances and open breakers are left out, unless no other instance can decode.
        """
        own = "" if self._config.overflow else self._config.cluster
        everything = self._instances.values()
        serving = [
            instance
            for instance in [instance for instance in everything if model in instance.models] or everything
            if not own or instance.address.cluster == own or instance.address.cluster_kind == "prfaas"
        ]
        states = [instance.state() for instance in serving if instance.address.name not in self.resting]
        if not any(state.decodes and state.instance not in excluded for state in states):
            states = [instance.state(is_last_resort=True) for instance in serving]
        return Snapshot(self.policy.threshold_tokens, tuple(states), local_policy=self.policy.local_policy)

    def is_base_model(self, model: str | None) -> bool:
        """Return whether the name is a base model, not an adapter or unknown. Without a name engines use their base model."""
        return model is None or any(model in instance.base_models for instance in self._instances.values())

    def max_model_len(self, model: str | None) -> int:
        """Return the most tokens that an instance takes for this model; 0 if that is unknown."""
        everything = self._instances.values()
        serving = [instance for instance in everything if model in instance.models] or list(everything)
        lengths = [instance.max_model_len for instance in serving if instance.models]
        return max(lengths) if lengths and all(lengths) else 0

    def must_count(self, max_prompt_tokens: int) -> bool:
        """Return whether a prompt of at most this length could be prefilled away from its decode instance."""
        return max_prompt_tokens > self.policy.threshold_tokens or self.policy.counts_all

    def any_decode(
        self, model: str | None = None, tenant: str = "", *, excluded: frozenset[InstanceId] = frozenset()
    ) -> Instance | None:
        """Return a decode instance for a tenant's request whose tokens do not matter; None if none is ready."""
        clusters = self._config.clusters_of_tenants().get(tenant)
        ready = [state for state in self.snapshot(model).instances if state.decodes]
        allowed = [state for state in ready if not clusters or state.cluster in clusters]
        facts = RequestFacts(0, excluded=excluded, home=ClusterName(self._config.cluster))
        chosen = choose_instance(allowed, facts)
        return self._instances[chosen.instance] if chosen else None

    async def probe_forever(self) -> None:
        """Check the health of every engine, and read the models of each engine that comes up.

        An engine that answers late delays the checks of no other.
        """
        running: set[Instance] = set()
        async with asyncio.TaskGroup() as probes:
            while True:
                self._changed.clear()
                for instance in self:
                    if instance not in running:
                        running.add(instance)
                        probes.create_task(self._probe(instance, running))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._config.probe_interval):
                        await self._changed.wait()

    async def _probe(self, instance: Instance, running: set[Instance]) -> None:
        """Check the health of one engine, and take it from those whose check is running."""
        try:
            await self._check_health(instance)
        finally:
            running.discard(instance)

    async def _check_health(self, instance: Instance) -> None:
        """Check the health of one engine, and end its legs if it cannot serve them.

        An engine that leaves a check unanswered gets no new requests. Its legs move if a second check is not answered
        either, because a busy engine may only be late.
        """
        was_silent = instance.silent_since is not None
        health = await self._ask_health(instance, self._config.silence_seconds)
        if health == "silent" and not was_silent:
            instance.fell_silent()
            health = await self._ask_health(instance, self._config.silence_seconds * SECOND_CHECK_RATIO)
        if health in ("healthy", "unhealthy"):
            instance.answered()
            if health == "healthy" and not instance.healthy:
                _log.info("instance.came_up", instance=instance.address.name, models=sorted(instance.base_models))
            instance.healthy = health == "healthy"
        if health not in ("healthy", "unknown"):
            self._move_legs(instance)

    async def _ask_health(self, instance: Instance, seconds: float) -> Health:
        """Return the answer to a health check within so many seconds. `down` is already noted at the instance."""
        started = time.monotonic()
        try:
            async with asyncio.timeout(seconds) as limit:
                async with self._session.get(f"{instance.url}/health") as response:
                    is_healthy = response.status == 200
                if is_healthy and not (instance.healthy and instance.models):
                    await self._read_models(instance)
        except (aiohttp.ClientError, OSError, ValueError, LookupError) as error:
            if time.monotonic() - started > seconds + MAX_TIMER_DELAY_SECONDS:
                return "unknown"  # This process itself stood still, so the time says nothing about the engine.
            if limit.expired() and instance.heard_at > started:
                return "unknown"  # Bytes of an answer came meanwhile, so the engine is busy and not silent.
            if limit.expired() and instance.healthy:
                return "silent"
            instance.failed(repr(error))
            return "down"
        return "healthy" if is_healthy else "unhealthy"

    def _move_legs(self, instance: Instance) -> None:
        """End the legs of an instance that fails its health checks, as far as another instance can take them.

        Any decode instance can do without a prefill leg. A decode leg needs another decode instance of the same model.
        """
        instance.end_legs("prefill")
        spare = self.any_decode(instance.identity)
        if spare is not None and spare is not instance and spare.is_available:
            instance.end_legs("decode")
        silent_since = instance.silent_since
        patience = STREAM_PATIENCE * self._config.silence_seconds
        if silent_since is not None and time.monotonic() - silent_since > patience:
            instance.end_legs("stream")

    async def _read_models(self, instance: Instance) -> None:
        async with self._session.get(f"{instance.url}/v1/models") as response:
            models = _MODELS.decode(await response.read()).data
        base = [model.id for model in models if not model.parent]
        instance.models = frozenset(model.id for model in models)
        instance.base_models, instance.identity = frozenset(base), base[0]
        instance.max_model_len = models[0].max_model_len


def addresses_of_clusters(clusters: tuple[ClusterConfig, ...]) -> Iterator[InstanceAddress]:
    """Yield the instances of configured clusters."""
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
