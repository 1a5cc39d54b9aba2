"""Scheduler side of the connector: opens transfers, parks requests, and plans the copies of each step."""

import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from prfaas import logs
from prfaas.agent.engine.client import AgentClient
from prfaas.agent.engine.protocol import (
    Alive,
    Attached,
    Forget,
    Forgotten,
    Hold,
    LookedUp,
    Lookup,
    Message,
    Receive,
    ReceiveReady,
    Send,
    SendOpened,
    Store,
    TransferFailed,
)
from prfaas.connector.block_map import BlockMap
from prfaas.connector.counts import Counts
from prfaas.connector.metadata import Direction, LoadSource, Outcome, ScheduledRequest, Step, Tables
from prfaas.connector.scheduler.liveness import HEARTBEAT_SECONDS, AgentLiveness
from prfaas.connector.scheduler.prefill_rate import PrefillRate
from prfaas.connector.scheduler.prefix_lookup import PrefixLookups
from prfaas.connector.scheduler.receive import InboundTransfers
from prfaas.connector.scheduler.send import OutboundTransfers
from prfaas.connector.scheduler.store import BlockPins, PrefixStores, SavedBlocks
from prfaas.connector.settings import ConnectorSettings
from prfaas.connector.transfer_params import (
    EngineRequest,
    direction_of,
    promised_tokens,
    read_parameters,
    refusal_reason,
    tenant_of,
    uses_other_connector,
)
from prfaas.hashing import HashChain
from prfaas.transfer_report import SENT_KEY, ReceivedReport, fallback_report
from prfaas.types import TransferId

# An idle engine waits so long for a message of the agent. It notices no new request meanwhile.
PAUSE_SECONDS = 0.01
REATTACH_WAIT_SECONDS = 0.02  # A new agent replies to its engine's scheduler within a millisecond.
POLL_INTERVAL_SECONDS = 0.1  # Without transfers, the only possible news is that the agent was lost.
RESET_WAIT_SECONDS = 60.0  # Forgetting a million blocks takes about 1 s in memory and 6 s on SSD.
_log = logs.get("connector.scheduler")


class SchedulerSide:
    """All transfers of one engine. Runs on the scheduler's thread."""

    def __init__(
        self,
        client: AgentClient,
        block_map: BlockMap,
        settings: ConnectorSettings,
        *,
        directions: Collection[Direction],
        pins: BlockPins,
        sleeps_when_idle: bool = True,
        num_workers: int = 0,
        has_one_attention: bool = False,
    ) -> None:
        """Start without transfers.

        Args:
            client: Connection to the agent.
            block_map: The engine's KV groups.
            settings: Settings of the connector.
            directions: Directions of transfers that the engine's role allows.
            pins: Keeps blocks from reuse.
            num_workers: Number of workers that report the end of their saves. 0 means that saves end with their step.
            sleeps_when_idle: Sleep in steps that compute nothing while a transfer is pending.
            has_one_attention: A load completes all that the engine's groups lack (see prefix_lookup.py).
        """
        self._client = client
        self._settings = settings
        self._directions = directions
        self.counts = counts = Counts()
        self._liveness = AgentLiveness(client.post, silence_seconds=settings.silence_seconds)
        self.prefill_rate = PrefillRate()
        self._outbound = OutboundTransfers(block_map, post=self._post, counts=counts)
        self._inbound = InboundTransfers(
            block_map,
            silence_seconds=settings.silence_seconds,
            prefill_rate=self.prefill_rate,
            post=self._post,
            counts=counts,
        )
        self._lookups = PrefixLookups(
            self._inbound, post=self._post, counts=counts, has_one_attention=has_one_attention
        )
        self._stores = PrefixStores(
            block_map, pins, min_tokens=settings.reuse_min_tokens, post=self._post, counts=counts
        )
        self._saved_blocks = SavedBlocks(pins, num_workers=num_workers)
        self._forgotten: TransferId | None = None  # Latest reset that the agent has completed.
        self._may_sleep = False  # The last step computed nothing, and the present one has found no work yet.
        self._pause_seconds = PAUSE_SECONDS if sleeps_when_idle else 0.0
        self._poll_at = 0.0  # Monotonic seconds.
        self._empty_step = Step()

    def on_new_request(self, request: EngineRequest) -> None:
        """Begin the transfer that the request asks for, and look up its prompt in the pool."""
        self.poll()  # An idle engine has not noticed yet that its agent was replaced.
        direction = direction_of(request.parameters)
        refusal = self._begin(request, direction) if direction else None
        if direction and refusal:
            if direction == "send":
                self._outbound.outcomes[request.request_id] = refusal
            else:
                transfer = read_parameters(request, direction)
                transfer_id = transfer.grant.transfer_id.hex() if transfer else ""
                self._inbound.reports[request.request_id] = ReceivedReport(transfer_id, refusal)
            self.counts.add_transfer(direction, refusal)
            _log.info("request.transfer_refused", request_id=request.request_id, direction=direction, reason=refusal)
        fallback = fallback_report(request.parameters)
        if fallback is not None and not direction:
            self._inbound.reports[request.request_id] = fallback
            self.counts.add_transfer("fallback", fallback.outcome)
            fields = {"transfer_id": fallback.transfer_id, "reason": fallback.outcome}
            _log.info("request.fell_back", request_id=request.request_id, **fields)
        if direction != "receive" or refusal:
            self.look_up(request, promised=promised_tokens(request.parameters))

    def look_up(self, request: EngineRequest, *, promised: int = 0) -> None:
        """Look up a request's prompt in the pool. The prompt of a preempted request includes the answer so far."""
        is_long = request.num_prompt_tokens >= self._settings.reuse_min_tokens
        is_agent_present = self._client.connected and not self._liveness.is_silent
        if not (self._settings.reuse and is_long and is_agent_present):
            return
        if request.excluded or uses_other_connector(request.parameters):
            return
        chain = request.chain(tenant_of(request.parameters, request.salt, default=self._settings.tenant))
        if chain is not None:
            self._lookups.begin(
                request.request_id, chain, promised_tokens=promised, reply_deadline=self._reply_deadline()
            )
            self._stores.begin_prompt(request.request_id, chain)

    def _begin(self, request: EngineRequest, direction: Direction) -> Outcome | None:
        """Begin a transfer, or return why not. The agent compares a decode leg's prompt with the granted prompt."""
        if not self._client.connected:
            return "agent_lost"
        transfer = read_parameters(request, direction)
        if transfer is None:
            return "no_grant"
        if self._liveness.is_silent:
            if direction == "receive":
                self._inbound.decline(transfer)
            return "agent_silent"
        grant = transfer.grant
        if grant.transfer_id in self._outbound or grant.transfer_id in self._inbound:
            return "in_use"
        refusal: Outcome | None = "wrong_role" if direction not in self._directions else None
        refusal = refusal or refusal_reason(request, transfer)
        chain = None if refusal else request.chain(grant.tenant)
        if chain is None:
            if direction == "receive":
                self._inbound.decline(transfer)
            return refusal or "unhashable"
        if direction == "receive":
            self._inbound.begin(request, transfer, chain, now=time.monotonic())
        elif chain.at(grant.num_tokens) != grant.prompt_hash:
            return "prompt_mismatch"
        else:
            self._outbound.begin(request, transfer, chain, reply_deadline=self._reply_deadline())
        return None

    def _post(self, message: Message) -> None:
        self._client.post(message)
        if isinstance(message, Send | Receive | Store | Lookup | Hold):
            self._liveness.beat()

    def _reply_deadline(self) -> float:
        """Return how long to wait for a reply. The wait is zero while the agent is silent."""
        if self._liveness.is_silent:
            self.poll()  # The reply may have come since the last step.
        now = time.monotonic()
        return now if self._liveness.is_silent else now + self._settings.silence_seconds

    def num_external_tokens(
        self, request_id: str, local_tokens: int, *, agreed_tokens: Callable[[], int] = lambda: 0
    ) -> int | None:
        """Return how many tokens beyond `local_tokens` can be loaded, or None if the engine must ask again.

        `agreed_tokens()` is the prefix that all groups of the engine hold.
        """
        self.poll()
        if self._lookups.must_ask_again(request_id, local_tokens, agreed_tokens):
            return None
        num_tokens = self._loadable_tokens(request_id, local_tokens)
        if num_tokens is not None or not self.sleep_if_idle():
            return num_tokens
        must_ask_again = self._lookups.must_ask_again(request_id, local_tokens, agreed_tokens)
        return None if must_ask_again else self._loadable_tokens(request_id, local_tokens)

    @property
    def allows_divergent_hits(self) -> bool:
        """True if the engine may count locally cached attention beyond its states in the next lookup."""
        return self._lookups.allow_divergent_hits

    def _loadable_tokens(self, request_id: str, local_tokens: int) -> int | None:
        now = time.monotonic()
        if self._outbound.is_undecided(request_id, now=now):
            return None
        if self._lookups.is_undecided(request_id, local_tokens, now=now):
            return None
        return self._inbound.num_tokens(request_id, local_tokens)

    def stay_parked(self, request_id: str) -> None:
        """Note that a request waits on, though the engine asks for it."""
        self._lookups.asked_again.discard(request_id)
        self.sleep_if_idle()

    def sleep_if_idle(self) -> bool:
        """Wait briefly for the agent if the engine computes nothing; return whether it did."""
        if not self._may_sleep:
            return False
        self._may_sleep = False
        self.poll(self._pause_seconds)
        return True

    def load_source(self, request_id: str) -> LoadSource | None:
        """Return where the blocks of a request's claim come from."""
        transfer = self._inbound.of_request(request_id)
        return None if transfer is None else transfer.source

    def waits(self, request_id: str) -> bool:
        """Return whether the KV of a request is still pending, by the messages read so far."""
        return self._inbound.waits(request_id)

    def poll(self, timeout_seconds: float = 0.0) -> int:
        """Handle the agent's messages, waiting up to `timeout_seconds` for the first; return their number."""
        messages = self._client.poll(timeout_seconds)
        for message in messages:
            self._on_message(message)
        if not self._client.connected:
            self._reattach()
        elif self._is_waiting:
            self._check_liveness()
        return len(messages)

    def _reattach(self) -> None:
        self._liveness.restart()
        self._fail_all("agent_lost")
        self._outbound.take_ends()  # The next agent gives the same handles to other transfers.
        if self._client.reattach(wait_seconds=REATTACH_WAIT_SECONDS):
            self._inbound.decline_unclaimed()

    @property
    def _is_waiting(self) -> bool:
        """True if a message of the agent is awaited."""
        return bool(self._outbound or self._inbound.is_waiting or self._lookups or self._stores.has_requested)

    def _check_liveness(self) -> None:
        """Send a heartbeat, and end all waits for a silent agent. What workers copy goes on: its slots stay mapped."""
        if not self._liveness.is_silent:
            self._liveness.beat()
        elif self._inbound.is_waiting or self._lookups:
            _log.warning("agent.silent", num_claims=len(self._inbound), num_lookups=len(self._lookups))
            self._inbound.fail_all("agent_silent")
            self._lookups.fail_all("agent_silent")

    def _on_message(self, message: Message) -> None:
        self._liveness.on_message()
        if isinstance(message, SendOpened | TransferFailed):
            self._outbound.on_message(message)
            self._stores.on_message(message)
        if isinstance(message, ReceiveReady | TransferFailed):
            self._inbound.on_message(message)
        elif isinstance(message, LookedUp):
            self._lookups.on_message(message)
        elif isinstance(message, Alive):
            self._liveness.on_alive(message.number)
            self._inbound.on_progress(message.claims, now=time.monotonic())
        elif isinstance(message, Forgotten):
            self._forgotten = message.transfer_id

    def _fail_all(self, reason: Outcome) -> None:
        """Give up everything that is pending."""
        for transfers in (self._outbound, self._lookups, self._inbound, self._stores):
            transfers.fail_all(reason)

    def reset(self, model: str) -> bool:
        """Have the agent forget all KV of a model; return False if it does not confirm in time.

        Pending transfers are given up, since their KV was computed before. The call blocks: whoever resets the caches has
        paused the engine.
        """
        self.poll()
        self._fail_all("reset")
        order, agent = TransferId(os.urandom(16)), self._client.attached
        self._client.post(Forget(order, model))
        deadline = time.monotonic() + RESET_WAIT_SECONDS
        while self._forgotten != order and self._is_attached_to(agent) and time.monotonic() < deadline:
            if self._liveness.is_silent:
                break
            self._liveness.beat()
            self.poll(HEARTBEAT_SECONDS)
        if self._forgotten == order:
            _log.info("cache.reset_completed", model=model)
            return True
        reason = "agent_silent" if self._is_attached_to(agent) else "agent_lost"
        _log.warning("cache.reset_failed", model=model, reason=reason)
        return False

    def _is_attached_to(self, agent: Attached) -> bool:
        return self._client.connected and self._client.attached is agent

    def on_allocated(self, request_id: str, external_tokens: int, tables: Tables) -> None:
        """Take a request's engine blocks, into which `external_tokens` tokens are loaded."""
        self._may_sleep = False
        if external_tokens:
            self._inbound.on_allocated(request_id, tables())
        else:
            self._inbound.on_declined(request_id)

    @property
    def _has_work(self) -> bool:
        """True if transfers are pending, or the workers do not know yet that one has ended."""
        has_transfers = self._outbound.has_work or self._inbound.has_work or bool(self._lookups)
        return has_transfers or self._stores.has_work or bool(self._saved_blocks)

    def plan_step(self, scheduled: Iterable[ScheduledRequest], *, prompt_tokens: int | None = None) -> Step:
        """Return the copies of this step, which computes `prompt_tokens` tokens of prompts.

        Without copies it is the same object each time. `prompt_tokens` is None if the step has no forward pass:
        vLLM may not report its end.
        """
        if prompt_tokens is not None:
            self.prefill_rate.on_planned(prompt_tokens, now=time.monotonic())
        return self._plan(scheduled) if self._has_work else self._plan_nothing(scheduled)

    def _plan_nothing(self, scheduled: Iterable[ScheduledRequest]) -> Step:
        self._may_sleep = next(iter(scheduled), None) is None
        now = time.monotonic()
        if now >= self._poll_at:
            self._poll_at = now + POLL_INTERVAL_SECONDS
            self.poll()
        attached = self._client.attached
        if (self._empty_step.epoch, self._empty_step.session) != (attached.epoch, attached.session):
            self._empty_step = Step(epoch=attached.epoch, session=attached.session)
        return self._empty_step

    def _plan(self, scheduled: Iterable[ScheduledRequest]) -> Step:
        self.poll()
        # May poll: all that follows belongs to the agent that is attached then.
        reply_deadline = self._reply_deadline()
        now = time.monotonic()
        stores = self._stores.saves(now=now)
        is_idle, saves = True, []
        for request in scheduled:
            is_idle = False
            save = self._outbound.save(request.request_id, request.computed_tokens, request.tables)
            if save is not None:
                saves.append(save)
            self._stores.on_scheduled(request, reply_deadline=reply_deadline)
        saves += stores
        self._may_sleep = is_idle
        (loads, failed), ends = self._inbound.take_loads(), self._outbound.take_ends()
        attached, number = self._client.attached, self._saved_blocks.add(saves)
        return Step(tuple(saves), loads, ends, attached.epoch, failed, attached.session, number)

    def on_loaded(self, request_ids: Iterable[str], *, failed: Collection[str]) -> None:
        """End the transfers of requests whose slots the workers have read."""
        for request_id in request_ids:
            self._inbound.on_loaded(request_id, has_failed=request_id in failed)

    def on_stored(self, request_ids: Iterable[str]) -> None:
        """End the stores of finished requests whose blocks the workers have copied."""
        for request_id in request_ids:
            self._stores.on_copied(request_id)

    def on_saved(self, steps: Mapping[int, int]) -> None:
        """Unpin the blocks of steps whose saves have ended. `steps` has the number of workers that report each step."""
        self._saved_blocks.on_saved(steps)

    def on_finished(
        self, request_id: str, leaves: Callable[[], HashChain | None], tables: Tables
    ) -> tuple[bool, dict[str, Any] | None]:
        """End all that belongs to a request.

        `leaves()` returns the hash chain of all computed tokens, or None if later requests cannot use them. The result says
        whether the engine must keep the request's blocks until `on_stored`, and what its response reports on its transfer.
        """
        sent = self._outbound.end(request_id)
        self._lookups.end(request_id)
        self._stores.end_prompt(request_id)
        received = self._inbound.end(request_id)
        params = {SENT_KEY: sent} if sent else received.to_params() if received else None
        chain = leaves() if self._settings.reuse and self._client.connected else None
        if chain is None or chain.num_tokens < self._settings.reuse_min_tokens:
            return False, params
        self._stores.add_finished(request_id, chain, tables(), reply_deadline=self._reply_deadline())
        return True, params

    @property
    def will_free_blocks(self) -> bool:
        """True if finished requests keep blocks that the engine gets back within a few steps."""
        return self._stores.will_free_blocks

    @property
    def needs_steps(self) -> bool:
        """True if the engine must step without requests, to copy pinned blocks."""
        return self._stores.has_pins or bool(self._saved_blocks)

    def close(self) -> None:
        """Leave the agent, which takes back all leases."""
        self._client.close()
