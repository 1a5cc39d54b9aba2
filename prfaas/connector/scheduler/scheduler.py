"""Whether a request whose KV is under way gets engine blocks before the KV is there: the setting `admission` (pure)."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from prfaas import logs
from prfaas.agent.engine.client import AgentClient
from prfaas.agent.engine.protocol import (
    Attached,
    Forget,
    Forgotten,
    LookedUp,
    Lookup,
    Message,
    ReceiveReady,
    Send,
    SendOpened,
    Store,
    TransferFailed,
)
from prfaas.connector.block_map import BlockMap
from prfaas.connector.metadata import Counts, Direction, Outcome, Scheduled, Step, Tables
from prfaas.connector.scheduler.prefix_lookup import PrefixLookups
from prfaas.connector.scheduler.receive import InboundTransfers
from prfaas.connector.scheduler.send import OutboundTransfers
from prfaas.connector.scheduler.store import BlockPins, Checkpoints, FinishedStores
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
from prfaas.types import TransferId


def may_preallocate(settings: ConnectorSettings, free_block_ratio: Callable[[], float]) -> Callable[[], bool]:
    """The rule that `settings.admission` names; `auto` looks at `free_block_ratio` each time it is asked."""
    rules: dict[str, Callable[[], bool]] = {
        "wait": lambda: False,
        "preallocate": lambda: True,
        "auto": lambda: free_block_ratio() >= settings.plenty_ratio,
    }
    return rules[settings.admission]


FIRST_PAUSE_SECONDS = (
    0.001  # of an idle engine; each look that finds nothing is followed by a pause of twice the length
)
REATTACH_WAIT_SECONDS = 0.02  # a new agent answers its engine's scheduler within a millisecond
LOOK_SECONDS = 0.1  # between two looks at an agent of which nothing is awaited: it can only have gone
_log = logs.get("connector.scheduler")


@dataclass(frozen=True)
class Finished:
    """What follows the end of a request.

    `keeps_blocks`: its engine blocks stay until `on_stored`. `sent`: how a prefill leg's transfer stands; anything but
    "completed" means that no KV is under way and the decode side waits in vain.
    """

    keeps_blocks: bool
    sent: Outcome | None


class SchedulerSide:
    """All transfers of one engine. Runs on the scheduler's thread."""

    def __init__(
        self,
        client: AgentClient,
        block_map: BlockMap,
        settings: ConnectorSettings,
        *,
        directions: Collection[Direction],
        free_block_ratio: Callable[[], float],
        pins: BlockPins | None = None,
    ) -> None:
        """`directions`: which ways this engine's role lets KV go. `free_block_ratio`: how many of its blocks are free.

        Without `pins` no prompt leaves checkpoints.
        """
        self._client = client
        self._settings = settings
        self._directions = directions
        self.tally = Counts()
        self._outgoing = OutboundTransfers(block_map, post=self._post, tally=self.tally)
        self._incoming = InboundTransfers(
            block_map,
            receive_timeout_seconds=settings.receive_timeout_seconds,
            hold_wait_seconds=settings.hold_wait_seconds,
            may_preallocate=may_preallocate(settings, free_block_ratio),
            post=self._post,
            tally=self.tally,
        )
        self._lookups = PrefixLookups(self._incoming, post=self._post, tally=self.tally)
        self._leftovers = FinishedStores(block_map, post=self._post, tally=self.tally)
        self._checkpoints = Checkpoints(
            block_map, pins, min_tokens=settings.reuse_min_tokens, post=self._post, tally=self.tally
        )
        self._asked_at = math.inf  # monotonic seconds: the first question since the agent last said anything
        self._refused: dict[str, Outcome] = {}  # prefill legs that run without a transfer
        self._failed_loads: list[str] = []  # planned with an agent that has gone
        self._forgotten: TransferId | None = None  # the latest order to forget that the agent has carried out
        self._has_backlog = False  # of a worker, at the end of the last step that is known of
        self._may_sleep = False  # the last step computed nothing, and this one has not found work yet
        self._pause_seconds = FIRST_PAUSE_SECONDS
        self._look_at = 0.0  # monotonic seconds
        self._empty_step = Step()
        self.num_heard = 0  # of the agent's messages; that it has gone counts as one

    def on_new_request(self, request: EngineRequest) -> None:
        """Begin the transfer that the request's parameters ask for, and look for what is here already."""
        self.poll()  # an idle engine has not noticed yet that its agent is another one
        direction = direction_of(request.parameters)
        refusal = self._begin(request, direction) if direction else None
        if direction and refusal:
            if direction == "send":
                self._refused[request.request_id] = refusal
            self.tally.transfers[direction, refusal] += 1
            _log.info("request.without_transfer", request_id=request.request_id, direction=direction, reason=refusal)
        if direction != "receive" or refusal:
            self._look_up(request, promised=promised_tokens(request.parameters))

    def on_preempted(self, request: EngineRequest) -> None:
        """The engine begins a request anew; `request` is all that it has to compute, the answer so far as well."""
        self._look_up(request, promised=0)

    def _look_up(self, request: EngineRequest, *, promised: int) -> None:
        if request.excluded or not self._reuses(request.num_prompt_tokens) or uses_other_connector(request.parameters):
            return
        chain = request.chain(tenant_of(request.parameters, request.salt, default=self._settings.tenant))
        if chain is not None:
            self._lookups.begin(request.request_id, chain, promised_tokens=promised, ask_until=self._ask_until())
            self._checkpoints.begin(request.request_id, chain)

    def _reuses(self, num_tokens: int) -> bool:
        its = self._settings
        return its.reuse and num_tokens >= its.reuse_min_tokens and self._client.connected

    def _begin(self, request: EngineRequest, direction: Direction) -> Outcome | None:
        """Why the transfer cannot be begun, if it cannot. The agent compares a decode leg's prompt with the granted one."""
        if not self._client.connected:
            return "agent_lost"
        asked = read_parameters(request, direction)
        if asked is None:
            return "no_grant"
        if asked.grant.transfer_id in self._outgoing or asked.grant.transfer_id in self._incoming:
            return "in_use"
        refusal: Outcome | None = "wrong_role" if direction not in self._directions else refusal_reason(request, asked)
        chain = None if refusal else request.chain(asked.grant.tenant)
        if chain is None:
            if direction == "receive":
                self._incoming.decline(asked)
            return refusal or "unhashable"
        if direction == "receive":
            self._incoming.begin(request, asked, chain, now=time.monotonic())
        elif chain.at(asked.grant.num_tokens) != asked.grant.prompt_hash:
            return "prompt_mismatch"
        else:
            self._outgoing.begin(request, asked, chain, ask_until=self._ask_until())
        return None

    def _post(self, message: Message) -> None:
        if isinstance(message, Send | Lookup | Store):
            self._asked_at = min(self._asked_at, time.monotonic())
        self._client.post(message)

    def _ask_until(self) -> float:
        """Until when a new question may be waited for: at no time while the agent leaves an earlier one unanswered."""
        now, wait_seconds = time.monotonic(), self._settings.open_wait_seconds
        if now - self._asked_at > wait_seconds:
            self.poll()  # what it has said since the last step
        return now if now - self._asked_at > wait_seconds else now + wait_seconds

    def num_external_tokens(
        self, request_id: str, local_tokens: int, *, asks_again: Callable[[int | None], bool] = lambda offered: False
    ) -> int | None:
        """Tokens beyond `local_tokens` that can be loaded; None while the agent has not answered.

        `asks_again`, of up to where the agent can serve the prompt, if that is known: whether the engine does with others.
        """
        self.poll()
        if asks_again(self._num_offered_tokens(request_id)):
            return None
        answer = self._answer(request_id, local_tokens)
        if answer is None and self.sleep_if_idle() and not asks_again(self._num_offered_tokens(request_id)):
            answer = self._answer(request_id, local_tokens)
        return answer

    def _num_offered_tokens(self, request_id: str) -> int | None:
        claimed = self._incoming.num_offered_tokens(request_id)
        return self._lookups.num_offered_tokens(request_id) if claimed is None else claimed

    def sleep_if_idle(self) -> bool:
        """Wait a moment for the agent when the engine computes nothing; whether it did."""
        if not self._may_sleep:
            return False
        self._may_sleep = False
        self._pause()
        return True

    def _pause(self) -> None:
        """Sleep until the agent says something, at most for `idle_wait_seconds`, in which nobody notices a new request."""
        limit = self._settings.idle_wait_seconds
        if self.poll(min(self._pause_seconds, limit)):
            self._pause_seconds = FIRST_PAUSE_SECONDS
        else:
            self._pause_seconds = min(2 * self._pause_seconds, limit)

    def waits(self, request_id: str) -> bool:
        """Whether the KV of a request is under way, as far as the agent's messages have been read."""
        return self._incoming.waits(request_id, now=time.monotonic())

    def _answer(self, request_id: str, local_tokens: int) -> int | None:
        now = time.monotonic()
        if self._outgoing.is_undecided(request_id, now=now):
            return None
        if self._lookups.is_undecided(request_id, local_tokens, now=now):
            return None
        return self._incoming.num_tokens(request_id, local_tokens, now=now)

    def poll(self, timeout_seconds: float = 0.0) -> int:
        """Take the agent's messages, waiting up to `timeout_seconds` for the first; how many there were."""
        messages = self._client.poll(timeout_seconds)
        self.num_heard += len(messages)
        if messages or not self._client.connected:
            self._asked_at = math.inf
        for message in messages:
            self._on_message(message)
        if not self._client.connected:
            self._fail_all("agent_lost")
            self._outgoing.take_ends()  # handles of the agent that is gone; the next one gives the same to others
            self._client.reattach(wait_seconds=REATTACH_WAIT_SECONDS)
        return len(messages)

    def _fail_all(self, reason: Outcome) -> None:
        """Whatever is under way goes without the agent."""
        self.num_heard += 1
        for requests in (self._outgoing, self._lookups, self._incoming, self._leftovers, self._checkpoints):
            requests.fail_all(reason)
        self._failed_loads += [load.request_id for load in self._incoming.take_loads()]

    def reset(self, model: str) -> bool:
        """Have the agent forget all KV of a model; False when it does not say in time that it has.

        What is under way goes without: it was computed, here or elsewhere, before. It is the one thing that an engine waits
        for: whoever resets its caches has paused it.
        """
        self.poll()
        self._fail_all("reset")
        order, asked = TransferId(os.urandom(16)), self._client.attached
        self._client.post(Forget(order, model))
        until = time.monotonic() + self._settings.reset_wait_seconds
        while self._is_there(asked) and self._forgotten != order and (left := until - time.monotonic()) > 0:
            self.poll(left)
        if self._forgotten == order:
            _log.info("cache.reset", model=model)
            return True
        why = "the agent is slow" if self._is_there(asked) else "the agent is away"
        _log.warning("cache.not_reset", model=model, why=why)
        return False

    def _is_there(self, attached: Attached) -> bool:
        """Whether the connection that began so still is."""
        return self._client.connected and self._client.attached is attached

    def _on_message(self, message: Message) -> None:
        if isinstance(message, Forgotten):
            self._forgotten = message.transfer_id
        if isinstance(message, SendOpened | TransferFailed):
            self._outgoing.on_message(message)
            self._leftovers.on_message(message)
            self._checkpoints.on_message(message)
        if isinstance(message, ReceiveReady | TransferFailed):
            self._incoming.on_message(message)
        if isinstance(message, LookedUp):
            self._lookups.on_message(message)

    def on_allocated(self, request_id: str, external_tokens: int, tables: Tables) -> None:
        """The engine has blocks for a request; `external_tokens` of it are to be loaded, none where it is 0."""
        self._may_sleep = False
        if external_tokens:
            self._incoming.allocated(request_id, tables())
        else:
            self._incoming.declined(request_id)

    @property
    def _has_work(self) -> bool:
        """Whether a transfer is under way, or the workers have not heard of the end of one."""
        under_way = self._outgoing.has_work or self._incoming.has_work or self._lookups or self._leftovers
        return bool(under_way or self._checkpoints.has_work or self._failed_loads)

    def plan_step(self, scheduled: Iterable[Scheduled]) -> Step:
        """What the workers copy in this step; the same object while that is nothing."""
        step = self._plan(scheduled) if self._has_work else self._plan_nothing(scheduled)
        if self._has_backlog and self._may_sleep:
            self._pause()
        self._has_backlog = False
        return step

    def _plan_nothing(self, scheduled: Iterable[Scheduled]) -> Step:
        self._may_sleep = next(iter(scheduled), None) is None
        if not self._may_sleep:
            self._pause_seconds = FIRST_PAUSE_SECONDS
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            self.poll()
        attached = self._client.attached
        if (self._empty_step.epoch, self._empty_step.session) != (attached.epoch, attached.session):
            self._empty_step = Step(epoch=attached.epoch, session=attached.session)
        return self._empty_step

    def _plan(self, scheduled: Iterable[Scheduled]) -> Step:
        self.poll()
        ask_until = self._ask_until()  # the last look at the agent: what follows is of the one that it has met
        now = time.monotonic()
        kept = [*self._leftovers.saves(now=now), *self._checkpoints.saves(now=now)]
        idle, saves = True, []
        for item in scheduled:
            idle = False
            saves.append(self._outgoing.save(item.request_id, item.computed_tokens, item.tables))
            self._checkpoints.computed(item, ask_until=ask_until)
        self._may_sleep = idle
        if not idle:
            self._pause_seconds = FIRST_PAUSE_SECONDS
        written = (*(save for save in saves if save is not None), *kept)
        self._incoming.expire(now)
        if idle and not written and self._incoming.num_awaited:
            self._pause()  # nobody asks for them, so nobody else sleeps
        failed, self._failed_loads = (*self._failed_loads, *self._incoming.take_failed_loads()), []
        loads, ends = self._incoming.take_loads(), self._outgoing.take_ends()
        attached = self._client.attached
        return Step(written, loads, ends, attached.epoch, failed, attached.session)

    def on_loaded(self, request_ids: Iterable[str], *, failed: Collection[str]) -> None:
        """The workers have read these requests' slots."""
        for request_id in request_ids:
            self._incoming.loaded(request_id, failed=request_id in failed)

    def on_stored(self, request_ids: Iterable[str]) -> None:
        """The workers have copied what these finished requests leave behind."""
        for request_id in request_ids:
            self._leftovers.released(request_id)

    def on_finished(self, request_id: str, leaves: Callable[[], HashChain | None], tables: Tables) -> Finished:
        """The request has ended, however it did.

        `leaves()` is the chain of all its computed tokens, or None when they are of no use to later requests.
        """
        sent = self._outgoing.end(request_id) or self._refused.pop(request_id, None)
        self._lookups.end(request_id)
        self._checkpoints.end(request_id)
        self._incoming.end(request_id)
        chain = leaves() if self._settings.reuse and self._client.connected else None
        if chain is None or chain.num_tokens < self._settings.reuse_min_tokens:
            return Finished(keeps_blocks=False, sent=sent)
        self._leftovers.begin(request_id, chain, tables(), ask_until=self._ask_until())
        return Finished(keeps_blocks=True, sent=sent)

    @property
    def will_free_blocks(self) -> bool:
        """Whether finished requests keep blocks that the engine gets back within a few steps."""
        return bool(self._leftovers)

    def on_backlog(self) -> None:
        """A worker tells its agent the rest with the next step. One that has gone is told nothing."""
        self._has_backlog = self._client.connected

    @property
    def needs_steps(self) -> bool:
        """Whether steps go on though no request is left: checkpoints keep blocks until a later one copies them, or a worker
        has not told its agent all."""
        return bool(self._checkpoints) or self._has_backlog

    def on_blocks_lost(self) -> None:
        """The engine's block tables are gone: nothing that was planned is copied into blocks or out of them any more."""
        for load in self._incoming.take_loads():
            self._incoming.loaded(load.request_id, failed=True)
        self._leftovers.fail_all("aborted")

    def close(self) -> None:
        """Leave the agent; it takes back every lease."""
        self._client.close()
