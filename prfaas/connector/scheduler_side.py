"""The scheduler's half of the connector: asks the agent, answers "not yet", plans each step's copies. Never waits long."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from prfaas import logs
from prfaas.agent.client import AgentClient
from prfaas.agent.protocol import Cancel, Receive, ReceiveReady, Release, Send, SendOpened, TransferFailed
from prfaas.connector.block_lists import GroupShape, group_blocks, num_complete_blocks
from prfaas.connector.config import ConnectorConfig
from prfaas.connector.step_work import BlockPairs, LoadWork, SaveWork
from prfaas.hashing import HashChain
from prfaas.types import GroupBlocks, TransferId

_log = logs.get("connector.scheduler")
BlockIds = tuple[list[int], ...]  # one list per group, entry j is block j of the request
SendState = Literal["asked", "open", "given_up"]


@dataclass
class Sent:
    """A prefill leg: what of it has been handed to the worker."""

    transfer_id: TransferId
    num_tokens: int
    groups: tuple[GroupBlocks, ...]
    asked_at: float
    state: SendState = "asked"
    opened: SendOpened | None = None
    num_saved: list[int] = field(default_factory=list)  # blocks of each group
    at_worker: bool = False


@dataclass
class Received:
    """A decode leg: its blocks are on their way, there, or not coming."""

    transfer_id: TransferId
    num_tokens: int
    groups: tuple[GroupBlocks, ...]
    ready: ReceiveReady | None = None
    failure: str | None = None
    local_tokens: int = 0  # what the engine's own cache already gives


class SchedulerSide:
    """Every transfer of one engine instance."""

    def __init__(self, client: AgentClient, config: ConnectorConfig, shapes: tuple[GroupShape, ...], *, state_position: bool) -> None:
        """`state_position`: a linear state stands at its last token's place in the block list, not first."""
        self._client = client
        self._config = config
        self._shapes = shapes
        self._state_position = state_position
        self._sent: dict[str, Sent] = {}
        self._received: dict[str, Received] = {}
        self._request_of: dict[TransferId, str] = {}
        self._loads: list[LoadWork] = []
        self.idle = True  # the last step computed nothing
        self.fallbacks: Counter[str] = Counter()

    # A request begins

    def send(self, request_id: str, chain: HashChain, transfer_id: TransferId, grant: bytes) -> None:
        """A prefill leg has come: ask for slots for all its blocks."""
        groups = self._groups(chain)
        sent = Sent(transfer_id, chain.num_tokens, groups, time.monotonic(), num_saved=[0] * len(groups))
        self._sent[request_id] = sent
        self._request_of[transfer_id] = request_id
        if self._client.connected:
            self._client.post(Send(transfer_id, grant, groups))
        else:
            self._give_up(sent, "agent_lost")

    def receive(self, request_id: str, chain: HashChain, transfer_id: TransferId, grant: bytes) -> None:
        """A decode leg has come: claim its blocks."""
        groups = self._groups(chain)
        received = Received(transfer_id, chain.num_tokens, groups)
        self._received[request_id] = received
        self._request_of[transfer_id] = request_id
        if self._client.connected:
            self._client.post(Receive(transfer_id, grant, chain.at(chain.num_tokens), groups))
        else:
            received.failure = "agent_lost"

    def _groups(self, chain: HashChain) -> tuple[GroupBlocks, ...]:
        return tuple(group_blocks(chain, index, shape) for index, shape in enumerate(self._shapes))

    # What the agent says

    def _listen(self, *, wait: bool) -> None:
        """Take the agent's messages; wait for one, a moment, only when the engine has nothing else to do."""
        for message in self._client.poll(self._config.idle_wait_seconds if wait and self.idle else 0.0):
            if isinstance(message, SendOpened):
                self._opened(message)
            elif isinstance(message, ReceiveReady):
                received = self._received.get(self._request_of.get(message.transfer_id, ""))
                if received is not None:
                    received.ready = message
            elif isinstance(message, TransferFailed):
                self._failed(message)
        if not self._client.connected:
            self._lost()

    def _opened(self, message: SendOpened) -> None:
        sent = self._sent.get(self._request_of.get(message.transfer_id, ""))
        if sent is not None and sent.state == "asked":
            sent.state, sent.opened = "open", message
        elif sent is None:
            self._client.post(Cancel(message.transfer_id))

    def _failed(self, message: TransferFailed) -> None:
        request_id = self._request_of.get(message.transfer_id, "")
        if request_id in self._received:
            self._received[request_id].failure = message.reason
        elif request_id in self._sent:
            self._give_up(self._sent[request_id], message.reason)
        _log.warning("transfer.failed", request=request_id, reason=message.reason, message=message.message)

    def _lost(self) -> None:
        for received in self._received.values():
            if received.ready is None:
                received.failure = received.failure or "agent_lost"
        for sent in self._sent.values():
            self._give_up(sent, "agent_lost")

    def _give_up(self, sent: Sent, reason: str) -> None:
        if sent.state != "given_up":
            sent.state = "given_up"
            self.fallbacks[reason] += 1

    # Scheduling

    def num_external_tokens(self, request_id: str, num_local_tokens: int) -> int | None:
        """Tokens beyond the local ones whose KV is in host memory; None when that is not known yet."""
        if request_id in self._received:
            self._listen(wait=True)
            return self._num_received(request_id, self._received[request_id], num_local_tokens)
        if request_id in self._sent:
            self._listen(wait=True)
            return self._wait_for_slots(self._sent[request_id])
        return 0

    def _num_received(self, request_id: str, received: Received, num_local_tokens: int) -> int | None:
        if received.failure is not None:
            self._fall_back(request_id, received.failure)
            return 0
        if received.ready is None:
            return None
        if num_local_tokens >= received.num_tokens:
            self._fall_back(request_id, "held_locally")
            return 0
        received.local_tokens = num_local_tokens
        return received.num_tokens - num_local_tokens

    def _wait_for_slots(self, sent: Sent) -> int | None:
        if sent.state == "asked":
            if time.monotonic() - sent.asked_at < self._config.send_wait_seconds:
                return None
            self._give_up(sent, "no_answer")
            self._client.post(Cancel(sent.transfer_id))
        return 0

    def _fall_back(self, request_id: str, reason: str) -> None:
        """The engine computes the prompt itself."""
        self.fallbacks[reason] += 1
        _log.info("request.recomputes", request=request_id, reason=reason)
        self.forget(request_id)

    def load(self, request_id: str, block_ids: BlockIds) -> None:
        """Blocks are allocated for a received prompt: plan the copy."""
        received = self._received[request_id]
        ready = received.ready
        assert ready is not None, "loads follow ReceiveReady"
        pairs, generations = [], []
        for position, blocks in enumerate(received.groups):
            skip = self._num_local_blocks(blocks, received.local_tokens)
            ids = self._ids(blocks, block_ids, received.num_tokens)[skip:]
            slots = [rank[position][skip:] for rank in ready.slots]
            pairs.append(BlockPairs(position, blocks.group, skip, ids, slots))
            generations.append([rank[position][skip:] for rank in ready.generations])
        self._loads.append(LoadWork(request_id, pairs, generations))

    def _num_local_blocks(self, blocks: GroupBlocks, local_tokens: int) -> int:
        shape = self._shapes[blocks.group]
        if shape.kind == "linear_state":
            return 0
        return min(blocks.num_blocks, max(0, local_tokens // shape.block_tokens - blocks.first_block))

    def _ids(self, blocks: GroupBlocks, block_ids: BlockIds, num_tokens: int) -> list[int]:
        """Engine blocks of a block list; a state's block is the one of the last token or the only one."""
        of_group = block_ids[blocks.group]
        shape = self._shapes[blocks.group]
        if shape.kind != "linear_state":
            return of_group[blocks.first_block : blocks.first_block + blocks.num_blocks]
        return [of_group[(num_tokens - 1) // shape.block_tokens if self._state_position else 0]]

    def plan_loads(self) -> list[LoadWork]:
        """The loads planned since the last step."""
        loads, self._loads = self._loads, []
        return loads

    def plan_save(self, request_id: str, block_ids: BlockIds, num_computed: int) -> SaveWork | None:
        """The blocks of a prefill leg that are whole once `num_computed` tokens are."""
        sent = self._sent.get(request_id)
        if sent is None or sent.opened is None or sent.state != "open":
            return None
        pairs = []
        for position, blocks in enumerate(sent.groups):
            start = sent.num_saved[position]
            end = num_complete_blocks(
                self._shapes[blocks.group], blocks, num_computed=num_computed, num_tokens=sent.num_tokens
            )
            if end > start:
                ids = self._ids(blocks, block_ids, sent.num_tokens)[start:end]
                slots = [rank[position][start:end] for rank in sent.opened.slots]
                pairs.append(BlockPairs(position, blocks.group, start, ids, slots))
                sent.num_saved[position] = end
        sent.at_worker = True
        return SaveWork(request_id, sent.opened.handle, pairs, last=num_computed >= sent.num_tokens)

    def sending(self) -> Iterable[str]:
        return self._sent.keys()

    # A request ends

    def loaded(self, request_ids: Iterable[str], failed: Iterable[str]) -> None:
        """The worker has read the slots of these requests."""
        for request_id in failed:
            self.fallbacks["slot_moved"] += 1
        for request_id in request_ids:
            self.forget(request_id)

    def forget(self, request_id: str) -> None:
        """This request needs its transfer no more."""
        received = self._received.pop(request_id, None)
        if received is not None:
            self._loads = [load for load in self._loads if load.request_id != request_id]
            self._client.post(Release(received.transfer_id) if received.ready else Cancel(received.transfer_id))
            self._request_of.pop(received.transfer_id, None)
        sent = self._sent.pop(request_id, None)
        if sent is not None:
            self._request_of.pop(sent.transfer_id, None)
            if not sent.at_worker:  # else the worker says so on the ring, after its last copy
                self._client.post(Cancel(sent.transfer_id))

    def counters(self) -> Mapping[str, int]:
        return dict(self.fallbacks)

    def close(self) -> None:
        self._client.close()
