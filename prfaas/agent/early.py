"""What an engine's scheduler asks before all of the engine's workers are attached: kept, in order, until they are.

After a restart of the agent that is the usual order: the scheduler's side comes back first, while workers may wait until
peers have been asked about their layout. In whose layout blocks are wanted is not known before.
"""

from __future__ import annotations

from prfaas.agent.engines import EngineConnection
from prfaas.agent.protocol import Receive, Send, TransferFailed
from prfaas.types import TransferId

MAX_EARLY = 1024  # of one engine: as many as it may hold parked while its workers attach


class EarlyClaims:
    """Sends and receives that wait for their engine's workers; the engine itself gives up those that wait too long."""

    def __init__(self) -> None:
        self._by_engine: dict[EngineConnection, dict[TransferId, Send | Receive]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_engine.values()))

    def keep(self, engine: EngineConnection, message: Send | Receive) -> None:
        """Keep one, or answer it with TransferFailed when there are too many."""
        kept = self._by_engine.setdefault(engine, {})
        if len(kept) < MAX_EARLY:
            kept[message.transfer_id] = message
        else:
            text = f"the workers of {engine.attach.instance} are not all attached"
            engine.post(TransferFailed(message.transfer_id, "no_layout", text))

    def take(self, instance: str) -> list[tuple[EngineConnection, Send | Receive]]:
        """What an engine has asked, whose workers are all there: kept no longer."""
        engines = [engine for engine in self._by_engine if engine.attach.instance == instance]
        return [(engine, message) for engine in engines for message in self._by_engine.pop(engine).values()]

    def drop(self, engine: EngineConnection, transfer_id: TransferId) -> None:
        """The engine no longer wants this one."""
        self._by_engine.get(engine, {}).pop(transfer_id, None)

    def forget(self, engine: EngineConnection) -> None:
        """This connection has ended."""
        self._by_engine.pop(engine, None)
