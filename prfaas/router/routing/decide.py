"""Decision for one request: the manager's, or the router's own from its snapshot of the fleet."""

import secrets
import time
from collections import OrderedDict
from dataclasses import replace

from prfaas import grants, tracing
from prfaas.hashing import HashChain, root_hash
from prfaas.router.config import RouterConfig
from prfaas.router.engines.fleet import Fleet, Instance
from prfaas.router.routing.manager_client import DecisionClient
from prfaas.router.routing.plan import RoutePlan, RoutingRequest
from prfaas.scheduler.route import route
from prfaas.scheduler.snapshot import RequestFacts
from prfaas.types import AgentName, TransferId

MAX_SESSIONS = 100_000  # About 20 MB. The least recently used session is dropped first.


class DecisionMaker:
    """Plans the routes of requests, and remembers the nodes of sessions."""

    def __init__(self, config: RouterConfig, secret: bytes, fleet: Fleet, manager: DecisionClient | None) -> None:
        self._config = config
        self._grant_key = grants.derive_key(secret, "grant")
        self._fleet = fleet
        self._manager = manager
        self._session_nodes: OrderedDict[tuple[str, str], AgentName] = OrderedDict()  # By tenant and session.

    async def plan(self, request: RoutingRequest) -> RoutePlan:
        """Return the plan for one request. Prompts that were not worth tokenising never reach the manager."""
        with tracing.within(tracing.child("router.decide", num_prompt_tokens=request.facts.num_prompt_tokens)) as span:
            plan = await self._plan(replace(request, facts=self._with_session(request)))
            span.note(route=plan.decision.route, reason=plan.decision.reason, decided_by=plan.decided_by)
        if request.session and plan.decision.decode is not None and plan.decision.decode in self._fleet:
            self._remember((request.tenant, request.session), self._fleet[plan.decision.decode].address.agent)
        return plan

    async def _plan(self, request: RoutingRequest) -> RoutePlan:
        snapshot = self._fleet.snapshot(request.model, excluded=request.facts.excluded)
        own = route(snapshot, request.facts)
        if request.prompt is None or own.decode is None or request.facts.obstacle is not None:
            return RoutePlan(own, request.facts, snapshot)
        identity = self._fleet[own.decode].identity
        chain = HashChain(root_hash(identity, request.tenant.encode()), request.prompt[:-1])  # The last token stays.
        if self._manager is not None:
            made = await self._manager.decide(identity, chain, request, snapshot)
            if made is not None:
                return made
            # Instances may have left during the wait, so the router decides from a new snapshot.
            snapshot = self._fleet.snapshot(request.model, excluded=request.facts.excluded)
            own = route(snapshot, request.facts)
        plan = RoutePlan(own, request.facts, snapshot, is_alone=self._manager is not None)
        if own.route != "remote" or own.prefill is None or own.decode is None:
            return plan
        transfer_id = TransferId(secrets.token_bytes(16))
        prefill, decode = self._fleet[own.prefill], self._fleet[own.decode]
        grant = self._grant(transfer_id, chain, prefill=prefill, decode=decode, tenant=request.tenant)
        return replace(plan, transfer_id=transfer_id, grant=grant)

    def _with_session(self, request: RoutingRequest) -> RequestFacts:
        agent = self._session_nodes.get((request.tenant, request.session)) if request.session else None
        return replace(request.facts, session_agent=agent) if agent is not None else request.facts

    def _remember(self, session: tuple[str, str], agent: AgentName) -> None:
        self._session_nodes[session] = agent
        self._session_nodes.move_to_end(session)
        if len(self._session_nodes) > MAX_SESSIONS:
            self._session_nodes.popitem(last=False)

    def _grant(
        self, transfer_id: TransferId, chain: HashChain, *, prefill: Instance, decode: Instance, tenant: str
    ) -> str:
        grant = grants.Grant(
            transfer_id=transfer_id,
            source=prefill.address.agent,
            destination=decode.address.agent,
            destination_address=decode.address.wire,
            prompt_hash=chain.at(chain.num_tokens),
            num_tokens=chain.num_tokens,
            max_bytes=grants.MAX_TRANSFER_BYTES,
            tenant=tenant,
            expires_at=time.time() + self._config.transfer_deadline,
        )
        return grants.to_text(grants.sign(grant, self._grant_key))
