"""Verdict on thresholds: decides if one threshold is the best policy for a deployment, and gives the reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from prfaas.model.capacity.bound import Bound, gain_of_offloading
from prfaas.model.capacity.loads import LoadModel
from prfaas.model.cost.curve import FloatArray

Verdict = Literal[
    "optimal",
    "any",
    "reversed",
    "not-monotone",
    "equal-lengths",
    "cached-prefixes",
    "several-clusters",
    "nothing-to-route",
]

_NUM_LENGTHS = 400
_NUM_POINTS = 1 << 14
# A ratio that changes by less over the whole range does not depend on the length.
_FLAT = 1e-3
_NOISE = 1e-9
# A plan within a thousandth of the bound is as good as optimal.
_GAP = 1e-3


@dataclass(frozen=True)
class Advantage:
    """Verdict on thresholds, and the ratio of local to remote prefill time at both ends of the length range."""

    verdict: Verdict
    reason: str
    ratio_at_shortest: float | None = None
    ratio_at_longest: float | None = None


def judge(loads: LoadModel, bound: Bound, *, gap: float) -> Advantage:
    """Return the verdict on thresholds.

    `bound` is the program with free roles; its prices weigh both kinds of prefill. `gap` is the plan's distance from
    the bound for whole splits.
    """
    deployment = loads.deployment
    if not deployment.prfaas:
        return Advantage("nothing-to-route", "there is no PrfaaS cluster to offload to")
    if len(deployment.prfaas) > 1 or len(deployment.pd) > 1:
        return Advantage(
            "several-clusters",
            "with several clusters and links the best policy gives each length to the cluster where it saves most;"
            " one threshold for all is a restriction, and the gap to the bound says what it costs",
        )
    lengths = np.geomspace(max(loads.lengths.support[0], 1.0), loads.lengths.support[1], _NUM_LENGTHS)
    ratio = _ratio(loads, lengths)
    ends = float(ratio[0]), float(ratio[-1])
    verdict, reason = _verdict(loads, bound, lengths, ratio)
    if verdict == "optimal" and gap > _GAP:
        verdict, reason = _cause_of_gap(loads)
    return Advantage(verdict, reason, *ends)


def _ratio(loads: LoadModel, lengths: FloatArray) -> FloatArray:
    (remote,), (local,) = loads.deployment.prfaas, loads.deployment.pd
    nothing = np.zeros_like(lengths)
    return local.profile.prefill.at(lengths, nothing) / remote.profile.prefill.at(lengths, nothing)


def _verdict(loads: LoadModel, bound: Bound, lengths: FloatArray, ratio: FloatArray) -> tuple[Verdict, str]:
    span = f"from {ratio[0]:.2f} at {lengths[0]:.0f} tokens to {ratio[-1]:.2f} at {lengths[-1]:.0f}"
    if ratio.max() / ratio.min() < 1 + _FLAT:
        return "any", (
            f"local prefill takes {ratio.mean():.2f} times as long as remote at every length: any threshold,"
            " or any other rule, that gives both sides the same share of the work is as good"
        )
    local, remote = gain_of_offloading(loads, bound.solution)
    gain = local.many(lengths) - remote.many(lengths)
    signs = np.sign(np.where(np.abs(gain) < _NOISE * np.abs(remote.many(lengths)), 0.0, gain))
    steps = np.diff(signs[signs != 0])
    changes = steps[steps != 0]
    if not changes.size or (changes.size == 1 and changes[0] > 0):
        return "optimal", f"local over remote prefill time goes {span}, so that the longest requests gain most"
    if changes.size == 1:
        return "reversed", (
            f"local over remote prefill time goes {span}: offloading saves most on the short requests,"
            " so the best policy offloads below a length, not above it"
        )
    return "not-monotone", (
        f"local over remote prefill time goes {span}, but not steadily: the best policy offloads"
        f" {(changes.size + 1) // 2} ranges of lengths"
    )


def _cause_of_gap(loads: LoadModel) -> tuple[Verdict, str]:
    """Return the reason why a threshold on uncached tokens falls short although long requests gain most."""
    new, _, weights = loads.lengths.points(_NUM_POINTS)
    lengths, where = np.unique(new, return_inverse=True)
    shares = np.bincount(where, weights)
    if shares.max() > _GAP:
        return "equal-lengths", (
            f"{shares.max():.1%} of the requests have {lengths[shares.argmax()]:.0f} uncached tokens: a threshold sends"
            " them all one way, where the best policy would divide them"
        )
    return "cached-prefixes", (
        "of two requests with as many uncached tokens the one with the longer cached prefix gains more:"
        " the best policy looks at both"
    )
