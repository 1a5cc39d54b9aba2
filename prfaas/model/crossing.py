"""Where a rising and a falling function meet, to the integer: the root finding behind thresholds and splits."""

from __future__ import annotations

from collections.abc import Callable


def first_at_least(claim: Callable[[int], bool], low: int, high: int) -> int:
    """The least integer in [low, high] for which `claim` holds; `claim` never turns false again and holds at `high`."""
    while low < high:
        middle = (low + high) // 2
        if claim(middle):
            high = middle
        else:
            low = middle + 1
    return low


def best_of_two(value: Callable[[int], float], rising_wins: Callable[[int], bool], low: int, high: int) -> int:
    """The integer that maximises min(rising, falling), where `rising_wins` says that rising ≥ falling.

    The greatest minimum lies at the crossing or just before it.
    """
    after = first_at_least(rising_wins, low, high)
    return max((max(after - 1, low), after), key=value)


def best_fraction(
    value: Callable[[float], float], rising_wins: Callable[[float], bool], low: float, high: float
) -> float:
    """As `best_of_two` over the real numbers, to one part in 10^12 of the interval."""
    for _ in range(40):
        middle = 0.5 * (low + high)
        if rising_wins(middle):
            high = middle
        else:
            low = middle
    return max((low, high), key=value)
