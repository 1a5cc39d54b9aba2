"""Engine that claims a transfer at the west's agent and overwrites the blocks that it gets."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TypeVar

from prfaas.agent.engine.client import AgentClient
from prfaas.agent.engine.protocol import LookedUp, Lookup, Receive, ReceiveReady, Release
from prfaas.connector.block_map import BlockMap
from prfaas.hashing import HashChain
from prfaas.types import TransferId
from tests.support.engine_pair import EnginePair
from tests.support.waiting import PATIENCE_SECONDS

Reply = TypeVar("Reply", LookedUp, ReceiveReady)


class PoolCorruptor:
    """Client of the west's agent. Leaving the context closes it."""

    def __init__(self, pair: EnginePair) -> None:
        self.pair = pair
        self._layout = pair.layout()
        socket = str(pair.west.socket)
        self._worker = AgentClient(socket, instance="corruptor", role="worker", layout=self._layout)
        self._scheduler = AgentClient(socket, instance="corruptor", role="scheduler")

    def __enter__(self) -> PoolCorruptor:
        return self

    def __exit__(self, *exception: object) -> None:
        self._scheduler.close()
        self._worker.close()

    def slots_of(self, prompt: list[int]) -> list[list[int]]:
        """Have a prompt transferred and return the slots of its blocks, by group."""
        grant, token = self.pair.signed(prompt)
        chain = self.pair.chain(prompt)
        shapes = tuple(replace(group, layers=()) for group in self._layout.groups)
        groups = BlockMap(shapes).transfer_groups(chain, grant.num_tokens)
        self._scheduler.post(Receive(grant.transfer_id, token, chain.at(grant.num_tokens), groups))
        self.pair.prefill_leg(prompt, self.pair.grant(prompt, transfer_id=grant.transfer_id))
        ready = self._reply(ReceiveReady)
        self._scheduler.post(Release(grant.transfer_id))
        return ready.slots[0]

    def held_lengths(self, chain: HashChain) -> list[int]:
        """Return the lengths of a prompt that the west's pool can serve, longest first."""
        units = b"".join(chain.units)
        self._scheduler.post(Lookup(TransferId(os.urandom(16)), chain.root, units, chain.num_tokens - 1))
        return [length for length, _ in self._reply(LookedUp).lengths]

    def zero_first_layer(self, group: int, slots: list[int]) -> None:
        size = self._layout.groups[group].layers[0].payload_bytes
        attached = self._worker.attached
        for slot in slots:
            start = attached.header_bytes + slot * attached.slot_bytes
            self._worker.arena[start : start + size] = bytes(size)

    def _reply(self, kind: type[Reply]) -> Reply:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            for message in self._scheduler.poll(0.1):
                assert isinstance(message, kind), message
                return message
        raise AssertionError(f"no {kind.__name__} has come")
