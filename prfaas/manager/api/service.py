"""What the manager answers, as functions of its world: no sockets, no waiting."""

from __future__ import annotations

from collections.abc import Callable

from prfaas import metrics
from prfaas.index.query import Answer, Query
from prfaas.kv.kinds import KINDS
from prfaas.manager.routing.outcomes import OutcomeLog
from prfaas.manager.routing.router import RequestRouter
from prfaas.manager.state.world import World, node_state
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.rpc.translate import answer_message, query_from, tiers_from
from prfaas.types import AgentName


class Service:
    """Questions that are answered from memory."""

    def __init__(
        self,
        *,
        name: str,
        world: World,
        routing: RequestRouter,
        clock: Callable[[], float],
        note: Callable[[Query, Answer], None],
    ) -> None:
        """`note` hears of every question to the index."""
        self._name = name
        self._world = world
        self.routing = routing
        self.outcomes = OutcomeLog(clock)
        self._clock = clock
        self._note = note

    def match(self, request: pb.MatchRequest) -> pb.MatchResponse:
        """How much of a prompt is cached where.

        Raises:
            IndexRefusal: unknown model, or hashes that are not of our making.
        """
        query = query_from(request)
        answer = self._world.index.match(query, tiers=tiers_from(request.tiers))
        self._note(query, answer)
        return answer_message(answer)

    def route(self, request: pb.RouteRequest) -> pb.RouteResponse:
        """Where a request runs.

        Raises:
            IndexRefusal: unknown model, alien hashes, or nobody who could serve it.
        """
        response = self.routing.route(request)
        if request.checkpoints or not response.odd_lengths:  # otherwise it is asked again, with the hashes at those
            metrics.MANAGER_DECISIONS.labels(route=response.route, reason=response.reason).inc()
        return response

    def report_requests(self, request: pb.ReportRequestsRequest) -> None:
        """Learn how requests were answered."""
        for its in request.requests:
            self.outcomes.note(its)
            decided = self.routing.decisions.get(its.decision_id)
            if decided is not None:
                self.routing.ppd_table.note(decided, its)

    def report_transfer(self, request: pb.ReportTransferRequest) -> None:
        """Compare what decisions promised with what the engines beside a node found; learn how its transfers went.

        Raises:
            IndexRefusal: the node has not registered.
        """
        cluster = self._world.cluster_of(AgentName(request.node))
        for timing in request.timings:
            self.outcomes.note_timing(timing)
        for promise in request.promises:
            found = min(promise.found_tokens, promise.predicted_tokens)
            metrics.MANAGER_PREDICTED_TOKENS.labels(cluster=cluster, kind="found").inc(found)
            missing = promise.predicted_tokens - found
            metrics.MANAGER_PREDICTED_TOKENS.labels(cluster=cluster, kind="missing").inc(missing)
            metrics.MANAGER_PROMISES.labels(cluster=cluster, outcome="broken" if missing else "kept").inc()
            for kind in KINDS.keys() & promise.held_tokens.keys():
                lacking = max(0, promise.predicted_tokens - promise.held_tokens[kind])
                metrics.MANAGER_MISSING_TOKENS.labels(cluster=cluster, group=kind).inc(lacking)

    def state(self, *, index_stale: bool) -> pb.StateSnapshot:
        """What routers decide short prompts from."""
        now = self._clock()
        return pb.StateSnapshot(
            version=self._world.version,
            manager=self._name,
            nodes=[node_state(member, now) for member in self._world.live()],
            threshold_tokens=self.routing.threshold_tokens,
            local_policy=self.routing.policy.local_policy,
            without_prefill=self.routing.policy.without_prefill,
            index_stale=index_stale,
            settling=self._world.is_settling,
            resting_instances=sorted(self._world.resting),
        )
