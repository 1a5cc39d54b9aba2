"""What an agent knows of one transfer that arrives."""

from __future__ import annotations

from dataclasses import dataclass

from prfaas import tracing
from prfaas.agent.engines import EngineConnection
from prfaas.agent.placement import Placement
from prfaas.agent.repacking import Repacking, agree
from prfaas.agent.transfer_log import TransferRecord
from prfaas.cachepool.arena import Arena
from prfaas.cachepool.repack import Side
from prfaas.grants import Grant
from prfaas.transport.inbound import TransferStats


@dataclass(eq=False)
class Inbound:
    """One transfer that arrives. `claimed` are the blocks that the reader expects, `arenas` those of its ranks."""

    grant: Grant
    deadline: float  # monotonic seconds
    open_until: float  # monotonic seconds: its sender opens it by then, or never will
    reader: EngineConnection | None = None
    claimed: Side | None = None
    arenas: tuple[Arena, ...] = ()
    placement: Placement | None = None  # of what arrives
    repacking: Repacking | None = None  # into the reader's layout, where that is another one
    record: TransferRecord | None = None
    is_partial: bool = False  # its sender was told to leave out what the reader holds in its own layout
    complete: bool = False
    reading: bool = False  # the engine was told the slots and has not released them
    memory_free: bool = True  # the transport cannot write to the slots
    delivery: tracing.Span = tracing.NO_SPAN  # from the claim until the engine has read the slots

    def expects(self, its: Side) -> bool:
        """Whether nothing is known of this transfer that speaks against these blocks."""
        placed = None if self.placement is None else Side(self.placement.plan.layouts, self.placement.plan.groups)
        known = (side for side in (self.claimed, placed) if side is not None)
        return all(agree(its, side, num_tokens=self.grant.num_tokens) for side in known)

    def received(self, stats: TransferStats) -> None:
        """What it has cost on the wire goes to its record, if anything of it came."""
        if self.record is not None:
            self.record.wire_bytes, self.record.checksum_failures = stats.wire_bytes, stats.checksum_failures

    @property
    def is_copy(self) -> bool:
        """Nobody claims it: it ends with its last byte."""
        return self.grant.kind == "copy"

    @property
    def is_vouched_for(self) -> bool:
        """Whether the hashes of what arrives are another's word than its sender's: the reader's, or, of a copy, its grant's."""
        its, claimed = self.placement, self.claimed
        return self.is_copy or (its is not None and claimed is not None and claimed.groups == its.plan.groups)

    @property
    def delivered(self) -> Placement | None:
        """The blocks that the reader gets."""
        return self.repacking.target if self.repacking is not None else self.placement

    def __repr__(self) -> str:
        return f"<Inbound {self.grant.transfer_id.hex()[:8]} complete={self.complete} reading={self.reading}>"
