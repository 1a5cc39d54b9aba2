"""Outcomes of the managers' commands, reported once and again for each repeated command."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from prfaas.types import CopyEnd, TransferId

# About 200 bytes for each outcome.
MAX_OUTCOMES = 4096


class CommandOutcomes:
    """Outcomes of one kind of command. A manager repeats a command until it has heard of the outcome."""

    def __init__(self, report: Callable[[CopyEnd], None]) -> None:
        """`report` gets each outcome."""
        self._report = report
        self._by_id: OrderedDict[TransferId, CopyEnd] = OrderedDict()

    def repeat(self, transfer_id: TransferId) -> bool:
        """Report the outcome of an ended command again; return False if it is unknown."""
        end = self._by_id.get(transfer_id)
        if end is not None:
            self._report(end)
        return end is not None

    def add(self, end: CopyEnd) -> None:
        """Report a new outcome, and forget the oldest beyond the limit."""
        self._by_id[end.transfer_id] = end
        if len(self._by_id) > MAX_OUTCOMES:
            self._by_id.popitem(last=False)
        self._report(end)
