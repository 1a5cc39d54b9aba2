"""Shape of an emulated link: rate, round-trip time, loss and bursts, and the TCP payload that fits."""

from __future__ import annotations

from dataclasses import dataclass

MTU = 1500
FRAMING_BYTES = 38  # Ethernet preamble, header, check sequence and gap of each segment.
# TCP payload of a full segment divided by the bytes on the wire: 1448 / 1538.
PAYLOAD_RATIO = (MTU - 52) / (MTU + FRAMING_BYTES)


@dataclass(frozen=True)
class WanShape:
    """Link with equal directions. With `second_bits_per_second` the rate alternates every `period_seconds`."""

    bits_per_second: float
    rtt_seconds: float
    loss: float = 0.0  # Ratio of segments.
    second_bits_per_second: float = 0.0
    period_seconds: float = 0.0

    @property
    def mean_bits_per_second(self) -> float:
        second = self.second_bits_per_second
        return (self.bits_per_second + second) / 2 if second else self.bits_per_second

    @property
    def payload_bytes_per_second(self) -> float:
        """TCP payload that the link can carry, as the mean of both phases."""
        return self.mean_bits_per_second / 8 * PAYLOAD_RATIO

    def payload_bytes_between(self, began_ns: int, ended_ns: int) -> float:
        """Return the TCP payload that fits between two times of the monotonic clock, phase by phase."""
        if not self.second_bits_per_second:
            return self.payload_bytes_per_second * (ended_ns - began_ns) / 1e9
        period, bits = int(self.period_seconds * 1e9), 0.0
        for phase in range(began_ns // period, ended_ns // period + 1):
            rate = self.second_bits_per_second if phase & 1 else self.bits_per_second
            bits += rate * (min(ended_ns, (phase + 1) * period) - max(began_ns, phase * period)) / 1e9
        return bits / 8 * PAYLOAD_RATIO

    @property
    def queue_bytes(self) -> float:
        """Size of the drop-tail queue: the bandwidth-delay product, at least 4 MB."""
        return max(4e6, self.bits_per_second / 8 * self.rtt_seconds)


PROFILES = {
    "metro": WanShape(10e9, 0.002),
    "regional": WanShape(5e9, 0.030, 0.0001),
    "continental": WanShape(2e9, 0.080, 0.001),
    "bursty": WanShape(1e9, 0.040, 0.0005, 0.3e9, 2.0),
}
