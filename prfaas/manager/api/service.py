"""Answers of the manager to routers and agents, call by call or many on one stream."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable

from prfaas import logs, metrics, tracing
from prfaas.errors import IndexRefusal
from prfaas.index.query import MatchResult, Query
from prfaas.manager.routing.outcomes import OutcomeLog
from prfaas.manager.routing.router import RequestRouter
from prfaas.manager.state.world import World
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.rpc.streams import FAILED
from prfaas.rpc.tasks import TimeSlice
from prfaas.rpc.translate import answer_message, query_from
from prfaas.types import AgentName

UNREADABLE = "the message cannot be decoded"

log = logs.get("manager.grpc")
Write = Callable[[pb.Reply], Awaitable[None]]


class Service:
    """Answers from memory. Opens no sockets. `who` is the caller's proven name."""

    def __init__(
        self,
        *,
        name: str,
        world: World,
        routing: RequestRouter,
        clock: Callable[[], float],
        note: Callable[[Query, MatchResult], None],
    ) -> None:
        """`note` receives every index query and answer."""
        self._name = name
        self._world = world
        self._clock = clock
        self.routing = routing
        self.outcomes = OutcomeLog(clock)
        self._note = note

    async def match(self, request: pb.MatchRequest, who: str) -> pb.MatchResponse:
        """Return how much of a prompt is cached on each node.

        Raises:
            IndexRefusal: the model is unknown, or the hashes are malformed.
        """
        query = query_from(request)
        answer = self._world.index.match(query)
        self._note(query, answer)
        return answer_message(answer)

    async def route(self, request: pb.RouteRequest, who: str) -> pb.RouteResponse:
        """Return where a request runs.

        Raises:
            IndexRefusal: the model is unknown, the hashes are malformed, or no instance could serve the request.
        """
        response = self.routing.route(request)
        # The router repeats the call with the hashes at these lengths.
        if request.checkpoints or not response.odd_lengths:
            metrics.MANAGER_DECISIONS.labels(route=response.route, reason=response.reason).inc()
        tracing.current().note(route=response.route, reason=response.reason, cached_tokens=response.cached_tokens)
        return response

    async def each(self, messages: AsyncIterator[pb.Question | None], who: str, write: Write) -> None:
        """Answer every query of a stream, those of one message in as few replies as the time slices allow.

        Raises:
            IndexRefusal: a message cannot be decoded. The replies that are due come first.
        """
        async for message in messages:
            if message is None:
                raise IndexRefusal("malformed", UNREADABLE)
            replies: list[pb.Reply] = []
            time_slice = TimeSlice()
            for question in (message, *message.further):
                replies.append(await self._reply(question, who))
                if time_slice.is_over:
                    await write(_join(replies))
                    replies.clear()
                    await time_slice.give_way()
            if replies:
                await write(_join(replies))

    async def _reply(self, question: pb.Question, who: str) -> pb.Reply:
        kind = question.WhichOneof("question")
        started, call = time.perf_counter(), "Route" if kind == "route" else "Match"
        try:
            with tracing.within(tracing.continued(f"manager.{call}", question.traceparent)):
                if kind == "route":
                    reply = pb.Reply(id=question.id, route=await self.route(question.route, who))
                else:
                    reply = pb.Reply(id=question.id, match=await self.match(question.match, who))
        except IndexRefusal as error:
            metrics.MANAGER_REFUSALS.labels(call=call, reason=error.reason).inc()
            return pb.Reply(id=question.id, refusal=pb.Refusal(reason=error.reason, message=str(error)))
        # An error concerns this query only; the others of its stream get their replies.
        except Exception as error:
            log.exception("query.failed", call=call)
            return pb.Reply(id=question.id, refusal=pb.Refusal(reason=FAILED, message=type(error).__name__))
        metrics.MANAGER_CALL_SECONDS.labels(call=call).observe(time.perf_counter() - started)
        return reply

    def report_requests(self, request: pb.ReportRequestsRequest) -> None:
        """Record the outcomes of requests, once."""
        if self.outcomes.is_repeated(request.reporter, request.number):
            return
        self.routing.traffic.note_reports(len(request.requests), self._clock())
        for report in request.requests:
            recorded = self.routing.decisions.get(report.decision_id)
            self.outcomes.note(report, recorded)
            if recorded is not None:
                self.routing.ppd_table.note(recorded, report)

    def report_transfer(self, request: pb.ReportTransferRequest) -> None:
        """Compare the predictions of decisions with what engines found, and record the times of transfers.

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

    def state(self, *, index_stale: bool) -> pb.StateSnapshot:
        """Return the state from which routers decide short prompts. With routes in the plan they ask about every prompt."""
        plan, policy = self._world.plan, self.routing.config.local_policy
        return pb.StateSnapshot(
            version=self._world.version,
            manager=self._name,
            nodes=[self._world.node_state(member) for member in self._world.live()],
            threshold_tokens=self.routing.threshold_tokens,
            local_policy="routes" if policy == "decode" and plan and plan.routes else policy,
            index_stale=index_stale,
            settling=self._world.is_settling,
            resting_instances=sorted(self._world.resting),
        )


def _join(replies: list[pb.Reply]) -> pb.Reply:
    """Join replies into one message."""
    first = replies[0]
    first.further.extend(replies[1:])
    return first
