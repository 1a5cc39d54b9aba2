"""From the manager's world to the scheduler's snapshot, and from its decision to a granted route."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from prfaas import grants
from prfaas.errors import IndexRefusal
from prfaas.hashing import HASH_BYTES
from prfaas.index.query import MatchResult, Query
from prfaas.manager.config import ManagerConfig
from prfaas.manager.planning.paths import Paths
from prfaas.manager.routing.decision_log import DecisionLog, RecordedDecision
from prfaas.manager.routing.policy import LivePpdTable, RequestRates, read_policy
from prfaas.manager.state.instances import Instances, Place, Places
from prfaas.manager.state.sessions import Session, Sessions
from prfaas.manager.state.traffic import RequestSample, Traffic
from prfaas.manager.state.world import UnknownLayouts, World
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.rpc.translate import checkpoints_from
from prfaas.scheduler.route import NOBODY_PREFILLS, Decision, route
from prfaas.scheduler.snapshot import RequestFacts, Snapshot
from prfaas.scheduler.threshold import PathCost
from prfaas.types import TRANSFER_ID_BYTES, AgentName, BlockHash, ClusterName, InstanceId, TransferId

_SEED_BYTES = 4  # of a request's id


class RequestRouter:
    """Decides requests; the decision itself is the scheduler's pure function of snapshot and facts."""

    def __init__(
        self,
        config: ManagerConfig,
        *,
        world: World,
        paths: Paths,
        secret: bytes,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        save_session: Callable[[str, str, Session], None],
        note: Callable[[Query, MatchResult], None] = lambda query, answer: None,
    ) -> None:
        """`clock` only goes forward; `wall_clock` is seconds since 1970, which grants expire by. `note` hears of every
        question to the index."""
        self._config = config
        self._world = world
        self._paths = paths
        self.path_cost: Callable[[ClusterName, float], PathCost | None] = lambda destination, capacity: None
        self._grant_key = grants.derive_key(secret, "grant")
        self._clock = clock
        self._wall_clock = wall_clock
        self.policy = read_policy(config)
        self.ppd_table = LivePpdTable(self.policy.ppd_table, window_seconds=config.ppd_refresh_seconds, clock=clock)
        self._rates = RequestRates()
        self.traffic = Traffic(window_seconds=config.traffic_seconds)
        self._instances = Instances(world, clock=clock)
        self._unknown_layouts = UnknownLayouts()
        self.decisions = DecisionLog()
        self._save_session = save_session
        self._note_match = note
        self.sessions = Sessions(expiry_seconds=config.session_seconds)

    @property
    def threshold_tokens(self) -> int:
        """t: the plan's, or the configured one while there is none."""
        plan = self._world.plan
        return self._config.threshold_tokens if plan is None else plan.threshold_tokens

    def route(self, request: pb.RouteRequest) -> pb.RouteResponse:
        """Where a request runs, and the grant for its transfer.

        Raises:
            IndexRefusal: alien hashes, an unknown model, or nobody who could serve it.
        """
        if request.num_prompt_tokens < 1:
            raise IndexRefusal("malformed", "num_prompt_tokens: a prompt has at least one token")
        now = self._clock()
        places = self._instances.serving(request.model)
        if not places:
            raise IndexRefusal("unknown_model", f"no live instance serves {request.model!r}")
        is_new = not request.checkpoints and self.decisions.get(request.request_id) is None
        if is_new:  # asked again, with lengths or without who failed it, a request counts once
            self._rates.count(request.cluster, request.model, now)
        answer = self._match(request, now)
        facts = self._facts(request, answer, now)
        snapshot = self._snapshot(request, places)
        decision = route(snapshot, facts)
        self._remember(request, snapshot, facts, decision)
        if decision.reason in NOBODY_PREFILLS and decision.route == "refused":
            return pb.RouteResponse(route=decision.route, reason=decision.reason, version=self._world.version)
        if decision.decode is None:
            raise IndexRefusal("no_route", f"{decision.reason}: nobody can answer this request")
        self._note(request, decision, places[decision.decode], now)
        if is_new:
            self._see(request, facts, places[decision.decode], now)
        if not any(facts.cached_tokens.values()):
            self._instances.note_cold_use(decision.decode, now)
        return self._response(request, decision, places=places, facts=facts, answer=answer)

    def _remember(self, request: pb.RouteRequest, snapshot: Snapshot, facts: RequestFacts, decision: Decision) -> None:
        decided = RecordedDecision(
            self._wall_clock(), request.model, request.tenant, request.session, snapshot, facts, decision
        )
        self.decisions.remember(request.request_id, decided)

    def knows_session(self, request: pb.RouteRequest) -> bool:
        """Whether memory has this request's session, or it has none."""
        return not request.session or self.sessions.get(request.tenant, request.session, now=self._clock()) is not None

    def learn_session(self, request: pb.RouteRequest, session: Session) -> None:
        """Take what the durable record has of this request's session."""
        self.sessions.put(request.tenant, request.session, session=session, now=self._clock())

    def _snapshot(self, request: pb.RouteRequest, places: Places) -> Snapshot:
        """The deployment as the scheduler sees it."""
        instances = self._instances.states(places, cluster=request.cluster, in_flight=request.in_flight)
        always_abundant = self._config.bandwidth == "abundant"
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
            local_policy=self.policy.local_policy,
            non_cached_tokens=self.policy.non_cached_tokens,
            ppd_table=self.ppd_table.current(),
            ppd_mode=self.policy.ppd_mode,
            endpoint_picker=self.policy.endpoint_picker,
            local_turns_ratio=self.policy.local_turns_ratio,
            without_prefill=self.policy.without_prefill,
            requests_per_second=self._rates.per_second(request.cluster, request.model, self._clock()),
            fetch_tokens=0 if self._config.bandwidth == "scarce" else self._config.fetch_tokens,
        )

    def _match(self, request: pb.RouteRequest, now: float) -> MatchResult | None:
        """What is cached of the prompt without its last token; None where no node has a layout of the model yet."""
        limit = request.num_prompt_tokens - 1
        query = Query(request.model, request.units, limit, checkpoints_from(request.checkpoints))
        if request.model not in self._world.index.models():
            query.check()
            self._unknown_layouts.note(request.model, now)
            return None
        answer = self._world.index.match(query)
        self._note_match(query, answer)
        return answer

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
        )

    def _conversation(self, request: pb.RouteRequest, now: float) -> tuple[AgentName | None, int]:
        """The node of the conversation's turn before, and which turn this is: 1 for a session never seen, 0 for unknown."""
        asked = self.decisions.get(request.request_id)
        if asked is not None:  # for the same request, whose session is known since it was decided first
            return asked.facts.session_agent, asked.facts.turn
        session = self.sessions.get(request.tenant, request.session, now=now)
        is_new = bool(request.session) and session is None
        return (session.agent if session else None), request.turn or int(is_new)

    def _note(self, request: pb.RouteRequest, decision: Decision, decode: Place, now: float) -> None:
        instances = [instance for instance in (decision.decode, decision.prefill) if instance is not None]
        self._instances.assign(request.request_id or secrets.token_bytes(8), instances, now=now)
        if request.session:
            session = Session(decode.member.node.name, request.num_prompt_tokens)
            self.sessions.put(request.tenant, request.session, session=session, now=now)
            self._save_session(request.tenant, request.session, session)

    def _see(self, request: pb.RouteRequest, facts: RequestFacts, decode: Place, now: float) -> None:
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
        assert decision.decode is not None, "refused before"
        decode = places[decision.decode]
        prefill = places[decision.prefill] if decision.prefill is not None else decode
        cached = facts.cached_at(prefill.member.node.name)
        nodes = answer.nodes if answer is not None else ()
        held = {match.node: match.attention_tokens for match in nodes}.get(decode.member.node.name, 0)
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
            its = decision.fetch
            response.fetch.CopyFrom(pb.Fetch(source=its.source, destination=its.destination, num_tokens=its.num_tokens))
        if decision.route == "remote":
            response.prefill.CopyFrom(_target(prefill))
            response.missing_tokens = max(0, request.num_prompt_tokens - 1 - held)
            response.transfer_id, response.grant = self._grant(request, prefill, decode)
        return response

    def _grant(self, request: pb.RouteRequest, prefill: Place, decode: Place) -> tuple[TransferId, bytes]:
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
            max_bytes=self._config.max_transfer_bytes,
            tenant=request.tenant,
            expires_at=self._wall_clock() + self._config.grant_seconds,
        )
        return transfer_id, grants.sign(grant, self._grant_key)


def _target(place: Place) -> pb.Target:
    node = place.member.node
    return pb.Target(instance=place.engine.instance, url=place.engine.url, node=node.name, cluster=node.cluster)
