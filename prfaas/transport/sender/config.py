"""How a link to one peer is made."""

from __future__ import annotations

from dataclasses import dataclass

from prfaas.transport.congestion.rate_budget import RateBudget
from prfaas.transport.net.tls import Certificates


@dataclass(frozen=True)
class LinkConfig:
    """How a link is made."""

    num_connections: int = 0  # 0: as many as the round trip asks for
    max_bytes_per_second: float = 0.0  # of payload and frames, over all connections; 0: as fast as the link allows
    congestion_control: str = "bbr"
    reconnect_seconds: float = 3.0
    certificates: Certificates | None = None  # None: unencrypted, which public addresses must allow
    insecure_plaintext: bool = False
    budgets: tuple[RateBudget, ...] = ()  # shared with other links
    packs: bool = True  # chunks are compressed while that makes the link faster
    lossy_fp8: bool = False  # what may be cast is, to half its bytes, where the peer agrees: LOSSY
    awaits_peer: bool = False  # it is the peer that dials, to receive; this side never does
