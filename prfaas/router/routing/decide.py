"""Where a request goes: with the manager's knowledge where there is one, from the router's own snapshot otherwise."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from prfaas import grants, tracing
from prfaas.hashing import HashChain, root_hash
from prfaas.router.config import RouterConfig
from prfaas.router.engines.fleet import Fleet, Instance
from prfaas.router.openai.tokenizer import TokenizedPrompt
from prfaas.scheduler.route import Decision, route
from prfaas.scheduler.snapshot import RequestFacts, Snapshot
from prfaas.types import AgentName, TransferId

REQUEST_ID_BYTES = 8
MAX_SESSIONS = 100_000  # about 20 MB; the longest unused goes first


@dataclass(frozen=True)
class RoutingRequest:
    """One request as decisions see it: `prompt` None when its tokens do not matter. `tenant` salts its hashes.

    `request_id` is the managers' name for it, however often it is decided.
    """

    facts: RequestFacts
    model: str | None
    prompt: TokenizedPrompt | None = None
    session: str = ""
    tenant: str = ""
    request_id: bytes = field(default_factory=partial(secrets.token_bytes, REQUEST_ID_BYTES))


@dataclass(frozen=True)
class ManagerDecision:
    """A decision of the manager's; `grant` is signed by it, for a remote route."""

    decision: Decision
    cached_tokens: int  # usable where the prompt is prefilled
    caches_known: bool = True  # False: no node has told how its model's KV lies, so nothing counted as cached
    decision_id: str = ""  # under which the manager remembers it
    transfer_id: TransferId | None = None
    grant: bytes | None = None


class Manager(Protocol):
    """Who knows what is cached where (`manager_link.py`)."""

    async def route(self, model: str, chain: HashChain, ask: RoutingRequest) -> ManagerDecision | None:
        """Return the manager's ruling, or None when there is none in time."""


@dataclass(frozen=True)
class RoutePlan:
    """What to do with one request. `transfer_id` and `grant` belong to a remote route."""

    decision: Decision
    facts: RequestFacts
    snapshot: Snapshot
    decided_by: str = "router"  # or manager
    decision_id: str = ""  # of a manager's decision: `/decisions/<id>` there has its snapshot
    transfer_id: TransferId | None = None
    grant: str = ""
    fell_back: bool = False
    is_alone: bool = False  # a manager was asked and none answered, so the router decided

    @property
    def promised_tokens(self) -> int:
        """Return tokens that the manager takes for cached where the prompt is prefilled; the router itself knows of none."""
        return self.facts.num_cached_tokens if self.decided_by == "manager" and not self.fell_back else 0

    @property
    def is_remote(self) -> bool:
        """Return whether both legs are to be sent."""
        return self.decision.route == "remote" and not self.fell_back

    def fallen_back(self) -> RoutePlan:
        """Return the same decode instance without the prefill leg."""
        return replace(self, fell_back=True)

    def summary(self) -> dict[str, Any]:
        """Return the fields of a log line."""
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
    """Makes plans."""

    def __init__(self, config: RouterConfig, secret: bytes, fleet: Fleet, manager: Manager | None) -> None:
        self._config = config
        self._grant_key = grants.derive_key(secret, "grant")
        self._fleet = fleet
        self._manager = manager
        self._sessions: OrderedDict[tuple[str, str], AgentName] = OrderedDict()  # by tenant and name

    async def plan(self, ask: RoutingRequest) -> RoutePlan:
        """Return the plan for one request; prompts that were not worth tokenising never reach the manager."""
        with tracing.within(tracing.child("router.decide", num_prompt_tokens=ask.facts.num_prompt_tokens)) as span:
            plan = await self._plan(replace(ask, facts=self._with_session(ask)))
            span.note(route=plan.decision.route, reason=plan.decision.reason, decided_by=plan.decided_by)
        if ask.session and plan.decision.decode is not None and plan.decision.decode in self._fleet:
            self._remember((ask.tenant, ask.session), self._fleet[plan.decision.decode].address.agent)
        return plan

    async def _plan(self, ask: RoutingRequest) -> RoutePlan:
        snapshot = self._fleet.snapshot(ask.model, excluded=ask.facts.excluded)
        own = route(snapshot, ask.facts)
        if ask.prompt is None or own.decode is None or ask.facts.obstacle is not None:
            return RoutePlan(own, ask.facts, snapshot)
        chain = _chain(self._fleet[own.decode].identity, ask.prompt, ask.tenant)
        if self._manager is not None:
            ruling = await self._manager.route(self._fleet[own.decode].identity, chain, ask)
            if ruling is not None:
                known = replace(ask.facts, num_cached_tokens=ruling.cached_tokens, caches_known=ruling.caches_known)
                grant = grants.to_text(ruling.grant) if ruling.grant else ""
                return RoutePlan(
                    ruling.decision, known, snapshot, "manager", ruling.decision_id, ruling.transfer_id, grant
                )
            # Instances may have left meanwhile.
            snapshot = self._fleet.snapshot(ask.model, excluded=ask.facts.excluded, is_alone=True)
            own = route(snapshot, ask.facts)
        plan = RoutePlan(own, ask.facts, snapshot, is_alone=self._manager is not None)
        if own.route != "remote" or own.prefill is None or own.decode is None:
            return plan
        transfer_id = TransferId(secrets.token_bytes(16))
        prefill, decode = self._fleet[own.prefill], self._fleet[own.decode]
        grant = self._grant(transfer_id, chain, prefill=prefill, decode=decode, tenant=ask.tenant)
        return replace(plan, transfer_id=transfer_id, grant=grant)

    def _with_session(self, ask: RoutingRequest) -> RequestFacts:
        agent = self._sessions.get((ask.tenant, ask.session)) if ask.session else None
        return replace(ask.facts, session_agent=agent) if agent is not None else ask.facts

    def _remember(self, session: tuple[str, str], agent: AgentName) -> None:
        self._sessions[session] = agent
        self._sessions.move_to_end(session)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)

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
            max_bytes=self._config.max_transfer_bytes,
            tenant=tenant,
            expires_at=time.time() + self._config.transfer_deadline,
        )
        return grants.to_text(grants.sign(grant, self._grant_key))


def _chain(model: str, prompt: TokenizedPrompt, tenant: str) -> HashChain:
    """Return the hashes of what is transferred: all tokens but the last."""
    return HashChain(root_hash(model, tenant.encode()), prompt.token_ids[:-1])
