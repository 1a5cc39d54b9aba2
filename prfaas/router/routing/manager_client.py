"""The manager as the router sees it: the instances it announces, the decisions it makes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator

from prfaas import logs, metrics
from prfaas.errors import IndexRefusal, ManagerUnreachable, PrfaasError
from prfaas.hashing import HASH_UNIT_TOKENS, HashChain
from prfaas.router.config import RouterConfig
from prfaas.router.engines.fleet import Fleet, InstanceAddress, StandalonePolicy, kind_of, role_of
from prfaas.router.routing.decide import ManagerDecision, RoutePlan, RoutingRequest
from prfaas.router.routing.record import RequestRecord
from prfaas.rpc.client import ManagerClient
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.scheduler.route import EXPLANATIONS, Decision
from prfaas.transport.net.tls import CertificateFiles
from prfaas.types import AgentName, ClusterName, InstanceId, TransferId

REFUSED_SECONDS = 2.0  # before a manager that refuses us is asked again
REPORT_SECONDS = 1.0
MAX_UNREPORTED = 4096  # ended requests; the oldest is given up first
MAX_ROUNDS = 2  # a second question states the hashes that the first answer asked for
_log = logs.get("router.manager")


class DecisionClient:
    """Questions to the managers, and their state kept in the fleet."""

    def __init__(self, config: RouterConfig, secret: bytes, fleet: Fleet) -> None:
        self._config = config
        self._fleet = fleet
        self._client = ManagerClient(
            config.managers,
            name="router",
            secret=secret,
            deadline_seconds=config.manager_timeout,
            tls=CertificateFiles.of(config),
        )
        self._tells_in_flight = False
        self._ended: deque[RequestRecord] = deque(maxlen=MAX_UNREPORTED)

    async def watch_forever(self) -> None:
        """Keep the fleet what the managers say; while none answers it stays as it was."""
        while True:
            try:
                async for state in self._client.watch_state():
                    self._take(state)
            except PrfaasError as error:
                _log.error("manager.refuses", error=str(error))
            await asyncio.sleep(REFUSED_SECONDS)

    def ended(self, record: RequestRecord) -> None:
        """Have the manager told how a request was answered."""
        if record.plan is not None:
            self._ended.append(record)

    async def report_forever(self) -> None:
        """Tell the manager of ended requests, each second; what it does not take in time it does not learn."""
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            if not self._ended:
                continue
            answered = [_answered(record, record.plan) for record in self._ended if record.plan is not None]
            self._ended.clear()
            try:
                await self._client.report_requests(pb.ReportRequestsRequest(requests=answered))
            except (ManagerUnreachable, IndexRefusal) as error:
                _log.warning("manager.not_told", num_requests=len(answered), error=str(error))

    def _take(self, state: pb.StateSnapshot) -> None:
        self._fleet.threshold_tokens = state.threshold_tokens
        self._fleet.counts_all = state.local_policy not in ("", "decode")
        self._fleet.policy_alone = StandalonePolicy(
            "pd" if state.local_policy == "pd" else "decode", "refuse" if state.without_prefill == "refuse" else "local"
        )
        self._tells_in_flight = state.local_policy == "endpoint_picker"
        self._fleet.resting = frozenset(InstanceId(name) for name in state.resting_instances)
        addresses = list(_addresses(state))
        if state.settling or state.index_stale:  # it may not have heard of all
            named = {address.name for address in addresses}
            addresses += [instance.address for instance in self._fleet if instance.address.name not in named]
        if addresses != [instance.address for instance in self._fleet]:
            self._fleet.update(addresses)
            _log.info("fleet.changed", manager=state.manager, instances=[address.name for address in addresses])

    async def route(self, model: str, chain: HashChain, ask: RoutingRequest) -> ManagerDecision | None:
        """Return where a request runs; None when no manager answers in time or knows the model: the router decides itself."""
        request = pb.RouteRequest(
            model=model,
            units=b"".join(chain.units),
            num_prompt_tokens=ask.facts.num_prompt_tokens,
            prompt_hash=chain.at(chain.num_tokens),
            tenant=ask.tenant,
            session=ask.session,
            cluster=self._config.cluster,
            max_output_tokens=ask.facts.max_output_tokens,
            turn=ask.facts.turn,
            request_id=ask.request_id,
            excluded_instances=[*ask.facts.excluded, *(its.address.name for its in self._fleet if not its.is_asked)],
            in_flight=_in_flight(self._fleet) if self._tells_in_flight else (),
        )
        try:
            answer = await self._client.route(request)
            for _ in range(MAX_ROUNDS - 1):
                lengths = [length for length in answer.odd_lengths if length <= chain.num_tokens]
                if not lengths:
                    break
                request.checkpoints.extend(pb.StatedCheckpoint(num_tokens=n, hash=chain.at(n)) for n in lengths)
                answer = await self._client.route(request)
        except (ManagerUnreachable, IndexRefusal) as error:
            _log.warning("manager.no_decision", error=str(error))
            return None
        return self._ruling(request.request_id, answer, await self._fetched_tokens(model, chain, answer))

    async def _fetched_tokens(self, model: str, chain: HashChain, answer: pb.RouteResponse) -> int:
        """Have the prefix copied that the decision asks for; how many tokens came, 0 when the rest is to be computed."""
        its = answer.fetch
        if not answer.HasField("fetch") or not 0 < its.num_tokens <= chain.num_tokens:
            return 0
        units = b"".join(chain.units[: its.num_tokens // HASH_UNIT_TOKENS])
        prefix = pb.Prefix(model=model, units=units, num_tokens=its.num_tokens, end_hash=chain.at(its.num_tokens))
        seconds = self._config.fetch_timeout
        request = pb.CopyRequest(
            prefix=prefix, source=its.source, destination=its.destination, timeout_seconds=seconds, is_fetch=True
        )
        outcome = await self._copy(request, seconds)
        metrics.FETCHES.labels(outcome=outcome).inc()
        if outcome != "completed":
            _log.warning("prefix.not_fetched", source=its.source, destination=its.destination, outcome=outcome)
        return its.num_tokens if outcome == "completed" else 0

    async def _copy(self, request: pb.CopyRequest, seconds: float) -> str:
        try:
            async with asyncio.timeout(seconds):
                return (await self._client.copy(request, timeout_seconds=seconds)).outcome
        except TimeoutError:
            return "late"
        except ManagerUnreachable:
            return "unreachable"
        except IndexRefusal:
            return "refused"

    def _ruling(self, request_id: bytes, answer: pb.RouteResponse, fetched_tokens: int) -> ManagerDecision | None:
        remote = answer.route == "remote"
        if answer.reason not in EXPLANATIONS:
            return None  # a newer manager's word
        if answer.route == "refused":
            return ManagerDecision(Decision("refused", answer.reason), 0, decision_id=request_id.hex())
        decision = Decision(
            "remote" if remote else "local",
            answer.reason,
            InstanceId(answer.decode.instance),
            InstanceId(answer.prefill.instance) if remote else None,
        )
        if any(name is not None and name not in self._fleet for name in (decision.decode, decision.prefill)):
            return None  # it knows instances that its last state did not name yet
        transfer_id = TransferId(answer.transfer_id) if remote else None
        return ManagerDecision(
            decision,
            max(answer.cached_tokens, fetched_tokens),
            caches_known=not answer.layout_unknown,
            decision_id=request_id.hex(),
            transfer_id=transfer_id,
            grant=answer.grant if remote else None,
        )

    async def close(self) -> None:
        await self._client.close()


def _answered(record: RequestRecord, plan: RoutePlan) -> pb.ReportRequestsRequest.Answered:
    return pb.ReportRequestsRequest.Answered(
        decision_id=bytes.fromhex(plan.decision_id),
        route=plan.decision.route,
        reason=plan.decision.reason,
        status=record.status,
        fallback=record.fallback or (record.failures[-1].reason if record.failures else ""),
        ttft_seconds=record.ttft_seconds or 0.0,
        decide_seconds=record.decide_seconds or 0.0,
        prefill_seconds=record.prefill_seconds or 0.0,
        transfer_id=plan.transfer_id or b"",
        tpot_seconds=record.tpot_seconds,
        streamed=record.is_streamed,
    )


def _in_flight(fleet: Fleet) -> Iterator[pb.InFlight]:
    for its in fleet:
        if its.num_requests:
            yield pb.InFlight(instance=its.address.name, num_requests=its.num_requests, num_tokens=its.num_tokens)


def _addresses(state: pb.StateSnapshot) -> Iterator[InstanceAddress]:
    for node_state in state.nodes:
        node = node_state.node
        for engine in node.engines:
            yield InstanceAddress(
                name=InstanceId(engine.instance),
                url=engine.url,
                role=role_of(engine.role),
                agent=AgentName(node.name),
                wire=node.wire_address,
                cluster=ClusterName(node.cluster),
                cluster_kind=kind_of(node.cluster_kind),
            )
