"""Router of requests: builds the scheduler's snapshot, and turns its decision into a route with a grant."""

import secrets
from collections.abc import Callable

from prfaas import grants, logs, metrics
from prfaas.errors import IndexRefusal
from prfaas.hashing import HASH_BYTES
from prfaas.index.query import MatchResult, Query
from prfaas.manager.config import GRANT_SECONDS, ManagerConfig
from prfaas.manager.planning.paths import Paths
from prfaas.manager.routing.decision_log import DecisionLog, RecordedDecision
from prfaas.manager.routing.policy import LivePpdTable, RequestRates, read_endpoint_picker, read_ppd_table
from prfaas.manager.state.instances import InstancePlace, Instances, Places
from prfaas.manager.state.sessions import SESSION_SECONDS, Session, Sessions
from prfaas.manager.state.traffic import MIN_WINDOW_SECONDS, RequestSample, Traffic
from prfaas.manager.state.world import World
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.rpc.translate import checkpoints_from
from prfaas.scheduler.route import Decision, route
from prfaas.scheduler.snapshot import RequestFacts, Snapshot
from prfaas.scheduler.threshold import PathCost
from prfaas.types import TRANSFER_ID_BYTES, AgentName, BlockHash, ClusterName, InstanceId, TransferId

_WARNING_SECONDS = 300.0  # Shortest time between two warnings about one model.
_SEED_BYTES = 4  # Leading bytes of the request id.
_log = logs.get("manager.routing")


class RequestRouter:
    """Decides requests with the scheduler's pure function of snapshot and facts."""

    def __init__(
        self,
        config: ManagerConfig,
        *,
        world: World,
        paths: Paths,
        secret: bytes,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        note: Callable[[Query, MatchResult], None] = lambda query, answer: None,
    ) -> None:
        """`clock` is monotonic; `wall_clock` is Unix time, for grants. `note` receives every index query and answer."""
        self.config = config
        self._world = world
        self._paths = paths
        self.path_cost: Callable[[ClusterName, float], PathCost | None] = lambda destination, capacity: None
        self._grant_key = grants.derive_key(secret, "grant")
        self._clock = clock
        self._wall_clock = wall_clock
        self._endpoint_picker = read_endpoint_picker(config.endpoint_picker)
        self.ppd_table = LivePpdTable(read_ppd_table(config.ppd_table), clock=clock)
        self._rates = RequestRates()
        self.traffic = Traffic(window_seconds=max(config.plan_seconds, MIN_WINDOW_SECONDS))
        self._instances = Instances(world, clock=clock)
        self._warned_at: dict[str, float] = {}
        self.decisions = DecisionLog()
        self._note_match = note
        self.sessions = Sessions(expiry_seconds=SESSION_SECONDS)

    def num_sessions(self) -> int:
        """Return the number of conversations that are not idle for too long."""
        self.sessions.expire(self._clock())
        return len(self.sessions)

    @property
    def threshold_tokens(self) -> int:
        """Return the plan's threshold, or the configured one while there is no plan."""
        plan = self._world.plan
        return self.config.threshold_tokens if plan is None else plan.threshold_tokens

    def route(self, request: pb.RouteRequest) -> pb.RouteResponse:
        """Return where a request runs, with the grant for its transfer.

        Raises:
            IndexRefusal: malformed hashes, an unknown model, or no instance that could serve it.
        """
        if request.num_prompt_tokens < 1:
            raise IndexRefusal("malformed", "num_prompt_tokens: a prompt has at least one token")
        now = self._clock()
        places = self._instances.serving(request.model)
        if not places:
            raise IndexRefusal("unknown_model", f"no live instance serves {request.model!r}")
        is_new = not request.checkpoints and self.decisions.get(request.request_id) is None
        # A retry with checkpoints, or after a failed instance, does not count as another request.
        if is_new:
            self._rates.count(request.cluster, request.model, now)
        answer = self._match(request, now)
        facts = self._facts(request, answer, now)
        snapshot = self._snapshot(request, places)
        decision = route(snapshot, facts)
        self._remember(request, snapshot, facts, decision)
        if decision.decode is None:
            raise IndexRefusal("no_route", f"{decision.reason}: no instance can answer this request")
        self._note_assignment(request, decision, places[decision.decode], now)
        if is_new:
            self._note_traffic(request, facts, places[decision.decode], now)
        if not any(facts.cached_tokens.values()):
            self._instances.note_cold_use(decision.decode, now)
        return self._response(request, decision, places=places, facts=facts, answer=answer)

    def _remember(self, request: pb.RouteRequest, snapshot: Snapshot, facts: RequestFacts, decision: Decision) -> None:
        decided = RecordedDecision(
            self._wall_clock(), request.model, request.tenant, request.session, snapshot, facts, decision
        )
        self.decisions.remember(request.request_id, decided)

    def _snapshot(self, request: pb.RouteRequest, places: Places) -> Snapshot:
        """Return the deployment as the scheduler sees it."""
        instances = self._instances.states(
            places, cluster="" if request.overflow else request.cluster, in_flight=request.in_flight
        )
        always_abundant = self.config.bandwidth == "abundant"
        states = self._paths.states(
            (instance.cluster for instance in instances),
            threshold_tokens=self.threshold_tokens,
            always_abundant=always_abundant,
            cost=self.path_cost,
        )
        return Snapshot(
            self.threshold_tokens,
            instances,
            self._paths.down,
            paths=states,
            local_policy=self.config.local_policy,
            ppd_table=self.ppd_table.current(),
            endpoint_picker=self._endpoint_picker,
            local_turns_ratio=self.config.local_turns_ratio,
            requests_per_second=self._rates.per_second(request.cluster, request.model, self._clock()),
            fetch_tokens=0 if self.config.bandwidth == "scarce" else self.config.fetch_tokens,
            routes=self._world.plan.routes if self._world.plan else (),
        )

    def _match(self, request: pb.RouteRequest, now: float) -> MatchResult | None:
        """Return the cached part of the prompt without its last token, or None if no node has a layout of the model
        yet.
        """
        limit = request.num_prompt_tokens - 1
        query = Query(request.model, request.units, limit, checkpoints_from(request.checkpoints))
        if request.model not in self._world.index.models():
            query.check()
            self._note_unknown_layout(request.model, now)
            return None
        answer = self._world.index.match(query)
        # Rebalancing copies what it notes to any cluster.
        if not request.tenant_clusters:
            self._note_match(query, answer)
        return answer

    def _note_unknown_layout(self, model: str, now: float) -> None:
        """Count a request that is routed as if nothing were cached, and warn about it."""
        metrics.MANAGER_WITHOUT_LAYOUT.labels(model=model).inc()
        if now >= self._warned_at.get(model, -_WARNING_SECONDS) + _WARNING_SECONDS:
            self._warned_at[model] = now
            effect = "nothing counts as cached: check the connector of the model's engines"
            _log.warning("layout.unknown", model=model, effect=effect)

    def _facts(self, request: pb.RouteRequest, answer: MatchResult | None, now: float) -> RequestFacts:
        session_agent, turn = self._conversation(request, now)
        return RequestFacts(
            num_prompt_tokens=request.num_prompt_tokens,
            cached_tokens={match.node: match.usable_tokens for match in answer.nodes} if answer is not None else {},
            caches_known=answer is not None,
            session_agent=session_agent,
            excluded=frozenset(InstanceId(name) for name in request.excluded_instances),
            turn=turn,
            max_output_tokens=request.max_output_tokens,
            seed=int.from_bytes(request.request_id[:_SEED_BYTES], "little"),
            clusters=frozenset(map(ClusterName, request.tenant_clusters)),
            home=ClusterName(request.cluster) if request.overflow and request.cluster else None,
        )

    def _conversation(self, request: pb.RouteRequest, now: float) -> tuple[AgentName | None, int]:
        """Return the node of the previous turn, and the turn's number: 1 for a new session, 0 if unknown."""
        earlier = self.decisions.get(request.request_id)
        if earlier is not None:
            # The first decision of this request has already updated the session.
            return earlier.facts.session_agent, earlier.facts.turn
        session = self.sessions.get(request.tenant, request.session, now=now)
        is_new = bool(request.session) and session is None
        return (session.agent if session else None), request.turn or int(is_new)

    def _note_assignment(self, request: pb.RouteRequest, decision: Decision, decode: InstancePlace, now: float) -> None:
        instances = [instance for instance in (decision.decode, decision.prefill) if instance is not None]
        self._instances.assign(request.request_id or secrets.token_bytes(8), instances, now=now)
        if request.session:
            session = Session(decode.member.node.name, request.num_prompt_tokens)
            self.sessions.put(request.tenant, request.session, session=session, now=now)

    def _note_traffic(self, request: pb.RouteRequest, facts: RequestFacts, decode: InstancePlace, now: float) -> None:
        cached = facts.cached_at(decode.member.node.name)
        self.traffic.note(RequestSample(now, request.num_prompt_tokens - cached, cached, request.max_output_tokens))

    def _response(
        self,
        request: pb.RouteRequest,
        decision: Decision,
        *,
        places: Places,
        facts: RequestFacts,
        answer: MatchResult | None,
    ) -> pb.RouteResponse:
        assert decision.decode is not None, "refused earlier"
        decode = places[decision.decode]
        prefill = places[decision.prefill] if decision.prefill is not None else decode
        cached = facts.cached_at(prefill.member.node.name)
        nodes = answer.nodes if answer is not None else ()
        held_tokens = {match.node: match.attention_tokens for match in nodes}.get(decode.member.node.name, 0)
        response = pb.RouteResponse(
            route=decision.route,
            reason=decision.reason,
            decode=_target(decode),
            cached_tokens=cached,
            uncached_tokens=request.num_prompt_tokens - cached,
            threshold_tokens=self.threshold_tokens,
            odd_lengths=answer.odd_lengths if answer is not None else (),
            version=self._world.version,
            layout_unknown=not facts.caches_known,
        )
        if decision.fetch is not None:
            response.fetch.CopyFrom(pb.Fetch(**vars(decision.fetch)))
        if decision.route == "remote":
            response.prefill.CopyFrom(_target(prefill))
            response.missing_tokens = max(0, request.num_prompt_tokens - 1 - held_tokens)
            response.transfer_id, response.grant = self._grant(request, prefill, decode)
        return response

    def _grant(
        self, request: pb.RouteRequest, prefill: InstancePlace, decode: InstancePlace
    ) -> tuple[TransferId, bytes]:
        if len(request.prompt_hash) != HASH_BYTES:
            raise IndexRefusal("alien_hash", f"prompt_hash: {HASH_BYTES} bytes, the hash of all tokens but the last")
        transfer_id = TransferId(secrets.token_bytes(TRANSFER_ID_BYTES))
        grant = grants.Grant(
            transfer_id=transfer_id,
            source=prefill.member.node.name,
            destination=decode.member.node.name,
            destination_address=decode.member.node.wire_address,
            prompt_hash=BlockHash(request.prompt_hash),
            num_tokens=request.num_prompt_tokens - 1,
            max_bytes=grants.MAX_TRANSFER_BYTES,
            tenant=request.tenant,
            expires_at=self._wall_clock() + GRANT_SECONDS,
        )
        return transfer_id, grants.sign(grant, self._grant_key)


def _target(place: InstancePlace) -> pb.Target:
    node = place.member.node
    return pb.Target(instance=place.engine.instance, url=place.engine.url, node=node.name, cluster=node.cluster)
