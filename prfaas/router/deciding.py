"""Where a request goes: with the manager's knowledge where there is one, from the router's own snapshot otherwise."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, replace
from typing import Protocol

from prfaas import grants
from prfaas.hashing import HashChain, root_hash
from prfaas.router.config import RouterConfig
from prfaas.router.fleet import Fleet, Instance
from prfaas.scheduler.route import Decision, route
from prfaas.scheduler.snapshot import RequestFacts
from prfaas.types import TransferId


@dataclass(frozen=True)
class Ruling:
    """A decision of the manager's; `grant` is signed by it, for a remote route."""

    decision: Decision
    cached_tokens: int  # usable where the prompt is prefilled
    transfer_id: TransferId | None = None
    grant: bytes | None = None


class Manager(Protocol):
    """Who knows what is cached where (`manager_link.py`)."""

    async def route(self, model: str, chain: HashChain, *, num_prompt_tokens: int, session: str) -> Ruling | None:
        """The manager's ruling, or None when there is none in time."""


@dataclass(frozen=True)
class Plan:
    """What to do with one request. `transfer_id` and `grant` belong to a remote route."""

    decision: Decision
    facts: RequestFacts
    decided_by: str  # manager or router
    transfer_id: TransferId | None = None
    grant: str = ""


class Deciding:
    """Makes plans."""

    def __init__(self, config: RouterConfig, secret: bytes, fleet: Fleet, manager: Manager | None) -> None:
        self._config = config
        self._grant_key = grants.derive_key(secret, "grant")
        self._fleet = fleet
        self._manager = manager

    async def plan(self, facts: RequestFacts, token_ids: list[int] | None, *, session: str) -> Plan:
        """The plan for one request; prompts that were not worth tokenising never reach the manager."""
        own = route(self._fleet.snapshot(), facts)
        if token_ids is None or own.decode is None or not facts.transferable:
            return Plan(own, facts, "router")
        num_tokens = len(token_ids) - 1
        model = self._fleet[own.decode].identity
        chain = HashChain(root_hash(model, self._config.tenant.encode()), token_ids[:num_tokens])
        if self._manager is not None:
            ruling = await self._manager.route(model, chain, num_prompt_tokens=len(token_ids), session=session)
            if ruling is not None:
                grant = grants.to_text(ruling.grant) if ruling.grant else ""
                known = replace(facts, num_cached_tokens=ruling.cached_tokens)
                return Plan(ruling.decision, known, "manager", ruling.transfer_id, grant)
        if own.route != "remote" or own.prefill is None:
            return Plan(own, facts, "router")
        transfer_id = TransferId(secrets.token_bytes(16))
        grant = self._grant(transfer_id, chain, prefill=self._fleet[own.prefill], decode=self._fleet[own.decode])
        return Plan(own, facts, "router", transfer_id, grant)

    def _grant(self, transfer_id: TransferId, chain: HashChain, *, prefill: Instance, decode: Instance) -> str:
        grant = grants.Grant(
            transfer_id=transfer_id,
            source=prefill.address.agent,
            destination=decode.address.agent,
            destination_address=decode.address.wire,
            prompt_hash=chain.at(chain.num_tokens),
            num_tokens=chain.num_tokens,
            max_bytes=self._config.max_transfer_bytes,
            tenant=self._config.tenant,
            expires_at=time.time() + self._config.transfer_deadline,
        )
        return grants.to_text(grants.sign(grant, self._grant_key))
