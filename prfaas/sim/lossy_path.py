"""What TCP carries over a long path that loses packets: the share of the link's rate that is left to KV."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

CongestionControl = Literal["bbr", "cubic"]
_SEGMENT_BYTES = 1448
# Mean window of AIMD that falls to 0.7 at each loss, in segments times the root of the loss: sqrt((1 + 0.7) / (2 (1 - 0.7))).
# Linux' cubic over emulated paths has 0.89 to 1.30 times as much (30 ms and 0.01 %: 75 Mbit/s a connection; 80 ms and
# 0.1 %: 10 Mbit/s; 40 ms and 0.05 %: 20 Mbit/s).
_WINDOW = 1.683


@dataclass(frozen=True)
class LossyPath:
    """A path of this round trip that loses this share of packets, by chance and one by one, with so many connections."""

    rtt_seconds: float = 0.0
    loss_ratio: float = 0.0
    num_connections: int = 8
    congestion_control: CongestionControl = "bbr"

    def carried(self, bytes_per_second: float) -> float:
        """Payload per second over a link of this rate: what is lost is sent twice; cubic takes each loss for a queue."""
        return min(bytes_per_second * (1.0 - self.loss_ratio), self._window_rate())

    def _window_rate(self) -> float:
        if self.congestion_control == "bbr" or not self.loss_ratio or not self.rtt_seconds:
            return math.inf
        window = _WINDOW / math.sqrt(self.loss_ratio) * _SEGMENT_BYTES
        return self.num_connections * window / self.rtt_seconds
