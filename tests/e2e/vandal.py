"""Another engine at the west's agent: claims a transfer for itself and changes the prefix blocks that it is given."""

from __future__ import annotations

import os
import time
from typing import TypeVar

from prfaas.agent.engine.client import AgentClient
from prfaas.agent.engine.protocol import LookedUp, Lookup, Receive, ReceiveReady, Release
from prfaas.connector.block_map import BlockMap
from prfaas.hashing import HashChain
from prfaas.types import TransferId
from tests.e2e.pair import Pair

Heard = TypeVar("Heard", LookedUp, ReceiveReady)


class Vandal:
    """Leaves its agent with the context."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self._layout = pair.layout()
        socket = str(pair.west.socket)
        self._worker = AgentClient(socket, instance="vandal", role="worker", layout=self._layout)
        self._scheduler = AgentClient(socket, instance="vandal", role="scheduler")

    def __enter__(self) -> Vandal:
        return self

    def __exit__(self, *exception: object) -> None:
        self._scheduler.close()
        self._worker.close()

    def slots_of(self, prompt: list[int]) -> list[list[int]]:
        """By group, where the agent holds the blocks of a prompt, once they have come from the east."""
        grant, token = self.pair.signed(prompt)
        shapes = (group.without_layers for group in self._layout.groups)
        chain = self.pair.chain(prompt)
        groups = BlockMap(tuple(shapes)).transfer_groups(chain, grant.num_tokens)
        self._scheduler.post(Receive(grant.transfer_id, token, chain.at(grant.num_tokens), groups))
        self.pair.prefill_leg(prompt, self.pair.grant(prompt, transfer_id=grant.transfer_id))
        ready = self._answer(ReceiveReady)
        self._scheduler.post(Release(grant.transfer_id))
        return ready.slots[0]

    def held_lengths(self, chain: HashChain) -> list[int]:
        """How much of a prompt the west's pool can serve, longest first."""
        self._scheduler.post(
            Lookup(TransferId(os.urandom(16)), chain.root, b"".join(chain.units), chain.num_tokens - 1)
        )
        return [length for length, _ in self._answer(LookedUp).lengths]

    def zero_first_layer(self, group: int, slots: list[int]) -> None:
        size = self._layout.groups[group].layers[0].payload_bytes
        attached = self._worker.attached
        for slot in slots:
            start = attached.header_bytes + slot * attached.slot_bytes
            self._worker.arena[start : start + size] = bytes(size)

    def _answer(self, kind: type[Heard]) -> Heard:
        deadline = time.monotonic() + 60.0
        while time.monotonic() < deadline:
            for message in self._scheduler.poll(0.1):
                assert isinstance(message, kind), message
                return message
        raise AssertionError(f"no {kind.__name__} has come")
