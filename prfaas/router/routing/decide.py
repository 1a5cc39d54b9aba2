"""Decision for one request: the manager's, or the router's own from its snapshot of the fleet."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

from prfaas import grants, tracing
from prfaas.hashing import HashChain, root_hash
from prfaas.router.config import RouterConfig
from prfaas.router.engines.fleet import Fleet, Instance
from prfaas.router.openai.tokenizer import TokenizedPrompt
from prfaas.router.routing.manager_client import DecisionClient, RoutingRequest
from prfaas.scheduler.route import Decision, route
from prfaas.scheduler.snapshot import RequestFacts, Snapshot
from prfaas.types import AgentName, TransferId

MAX_SESSIONS = 100_000  # About 20 MB. The least recently used session is dropped first.
MAX_TRANSFER_BYTES = 64 << 30


@dataclass(frozen=True)
class RoutePlan:
    """Decision for one request, and what its execution needs. A remote route has `transfer_id` and `grant`.

    `decision_id` identifies a manager's decision: its page `/decisions/<id>` has the snapshot.
    `is_alone`: no manager answered, so the router decided.
    """

    decision: Decision
    facts: RequestFacts
    snapshot: Snapshot
    decided_by: str = "router"
    decision_id: str = ""
    transfer_id: TransferId | None = None
    grant: str = ""
    fell_back: bool = False
    is_alone: bool = False

    @property
    def promised_tokens(self) -> int:
        """Return the tokens that the manager expects to be cached on the instance that prefills."""
        return self.facts.num_cached_tokens if self.decided_by == "manager" and not self.fell_back else 0

    @property
    def is_remote(self) -> bool:
        """Return whether both legs are to be sent."""
        return self.decision.route == "remote" and not self.fell_back

    def fallen_back(self) -> RoutePlan:
        """Return the plan for the same decode instance without the prefill leg."""
        return replace(self, fell_back=True)

    def summary(self) -> dict[str, Any]:
        """Return the fields for the request's log line."""
        return {
            "route": self.decision.route,
            "reason": self.decision.reason,
            "decode": self.decision.decode,
            "prefill": self.decision.prefill,
            "decided_by": self.decided_by,
            "decision_id": self.decision_id or None,
            "num_prompt_tokens": self.facts.num_prompt_tokens,
            "num_cached_tokens": self.facts.num_cached_tokens,
            "counted": self.facts.counted,
            "obstacle": self.facts.obstacle,
            "transfer_id": self.transfer_id.hex() if self.transfer_id else None,
        }


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
        chain = _hash_chain(identity, request.prompt, request.tenant)
        if self._manager is not None:
            made = await self._manager.decide(identity, chain, request)
            if made is not None:
                facts = replace(request.facts, num_cached_tokens=made.cached_tokens, caches_known=made.caches_known)
                grant = grants.to_text(made.grant) if made.grant else ""
                return RoutePlan(made.decision, facts, snapshot, "manager", made.decision_id, made.transfer_id, grant)
            # Instances may have left during the wait, so the router decides from a new snapshot.
            snapshot = self._fleet.snapshot(request.model, excluded=request.facts.excluded, is_alone=True)
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
            max_bytes=MAX_TRANSFER_BYTES,
            tenant=tenant,
            expires_at=time.time() + self._config.transfer_deadline,
        )
        return grants.to_text(grants.sign(grant, self._grant_key))


def _hash_chain(model: str, prompt: TokenizedPrompt, tenant: str) -> HashChain:
    """Return the hashes of the tokens that are transferred: all but the last."""
    return HashChain(root_hash(model, tenant.encode()), prompt.token_ids[:-1])
