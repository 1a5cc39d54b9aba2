"""The KV of one prompt on its way: whole after the prefill, or piece by piece while it is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prfaas.sim.request import Request
from prfaas.sim.timeline import Timeline
from prfaas.sim.wire import Egress, Link

_EIGHTHS = 8  # a link as fast as the prefill falls behind by one of them at most


class Transfers:
    """Sends prompts' KV over one link. With `num_layers` above 1 the KV leaves while it is computed.

    The early layers then go in a few pieces, each when its last layer is computed, ever smaller ones towards the end;
    the last layer goes alone, at the prefill's end.
    """

    def __init__(
        self,
        timeline: Timeline,
        egress: Egress,
        link: Link,
        *,
        num_layers: int,
        is_wanted: Callable[[Request], bool] = lambda _: True,
    ) -> None:
        self._is_wanted = is_wanted
        self._timeline, self._egress, self._link = timeline, egress, link
        self._pieces = list(_pieces(num_layers))

    def start(
        self, request: Request, num_bytes: float, *, prefill_seconds: float, arrived: Callable[[Request], None]
    ) -> None:
        """The prefill starts now and takes so long; `arrived(request)` once every byte is there.

        A piece that is due when `is_wanted` denies its request does not leave.
        """
        left = [len(self._pieces)]

        def one_arrived(request: Request) -> None:
            left[0] -= 1
            if not left[0]:
                arrived(request)

        for moment, share in self._pieces:
            self._timeline.at(
                self._timeline.now + moment * prefill_seconds, self._send, (request, share * num_bytes, one_arrived)
            )

    def _send(self, piece: tuple[Request, float, Callable[[Request], None]]) -> None:
        request, num_bytes, arrived = piece
        if self._is_wanted(request):
            self._egress.send(self._link, num_bytes, arrived, request)


def _pieces(num_layers: int) -> Iterator[tuple[float, float]]:
    """(when it is computed, as a share of the prefill; its share of the bytes): eighths, the last one halved and halved."""
    eighth, sent = -(-num_layers // _EIGHTHS), 0
    while sent < num_layers:
        left = num_layers - sent
        layers = eighth if left > eighth else max(1, left // 2)
        sent += layers
        yield sent / num_layers, layers / num_layers
