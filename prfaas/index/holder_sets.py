"""Sets of holders by number: many checkpoints have the same holders, and each says so with a number."""

from __future__ import annotations

NOBODY = 0  # the number of the empty set


class HolderSets:
    """Every set that some entry names, each once. An entry gives its set back with the change that replaces it."""

    def __init__(self) -> None:
        self._sets: list[tuple[int, ...]] = [()]
        self._uses: list[int] = [0]
        self._ids: dict[tuple[int, ...], int] = {}
        self._free: list[int] = []

    def __getitem__(self, number: int) -> tuple[int, ...]:
        return self._sets[number]

    def add(self, number: int, holder: int) -> int:
        """The set that an entry has after `holder` came to set `number`."""
        return self._exchange(number, tuple(sorted({*self._sets[number], holder})))

    def discard(self, number: int, holder: int) -> int:
        """The set that an entry has after `holder` left set `number`."""
        return self._exchange(number, tuple(other for other in self._sets[number] if other != holder))

    def _exchange(self, number: int, holders: tuple[int, ...]) -> int:
        taken = self._take(holders) if holders else NOBODY
        if number != NOBODY:
            self._give_back(number)
        return taken

    def _take(self, holders: tuple[int, ...]) -> int:
        known = self._ids.get(holders)
        if known is not None:
            self._uses[known] += 1
            return known
        number = self._free.pop() if self._free else len(self._sets)
        if number == len(self._sets):
            self._sets.append(holders)
            self._uses.append(1)
        else:
            self._sets[number], self._uses[number] = holders, 1
        self._ids[holders] = number
        return number

    def _give_back(self, number: int) -> None:
        self._uses[number] -= 1
        if not self._uses[number]:
            del self._ids[self._sets[number]]
            self._sets[number] = ()
            self._free.append(number)
