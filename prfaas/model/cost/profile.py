"""Times of one instance: prefill by length and cached prefix, decode steps by batch and context."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from prfaas.model.cost.colocation import SharingSpeeds
from prfaas.model.cost.curve import Curve, FloatArray, nonnegative_fit

# A plane that misses a step by more than this ratio is none.
_POOR = 0.3

# Coefficients of 1, m, m² and m n.
AppendCoefficients = tuple[float, float, float, float]


@dataclass(frozen=True)
class PrefillProfile:
    """T_prefill(m | n): seconds to prefill m new tokens behind n cached ones.

    `fresh` is T_prefill(l) without a prefix, measured from `min_tokens` to `max_tokens` and extrapolated beyond.
    Without `append`, T(m | n) = T(n + m) − T(n) + T(0): a prefix saves its own prefill except the fixed part.
    For a quadratic T = a + b l + c l² that is a + b m + c (m² + 2 m n).
    `append` = (a, b, c, d) replaces it by the measured a + b m + c m² + d m n.
    """

    fresh: Curve
    min_tokens: float
    max_tokens: float
    append: AppendCoefficients | None = None

    def seconds(self, new: float, cached: float = 0.0) -> float:
        """Return T_prefill(new | cached)."""
        if not cached or not new:
            return self.fresh(new)
        if self.append is not None:
            a, b, c, d = self.append
            return a + (b + c * new + d * cached) * new
        return self.fresh(new + cached) - self.fresh(cached) + self.fresh(0.0)

    def at(self, new: FloatArray, cached: FloatArray) -> FloatArray:
        """Return the seconds of each request, as a `Cost`."""
        if self.append is not None:
            a, b, c, d = self.append
            measured: FloatArray = np.where(cached > 0, a + (b + c * new + d * cached) * new, self.fresh.many(new))
            return measured
        saved: FloatArray = np.where(cached > 0, self.fresh.many(cached) - self.fresh(0.0), 0.0)
        return self.fresh.many(new + cached) - saved

    def times(self, factor: float) -> PrefillProfile:
        """Return the profile of hardware that takes `factor` times as long."""
        append = None if self.append is None else _scaled(self.append, factor)
        return replace(self, fresh=self.fresh.times(factor), append=append)


def _scaled(append: AppendCoefficients, factor: float) -> AppendCoefficients:
    a, b, c, d = append
    return a * factor, b * factor, c * factor, d * factor


@dataclass(frozen=True)
class DecodeProfile:
    """Seconds of one decode step, measured up to `max_batch`.

    A step takes base + per_request · batch + per_context_token · batch · context.
    """

    base_seconds: float
    seconds_per_request: float
    seconds_per_context_token: float = 0.0
    max_batch: int = 1 << 16

    def step_seconds(self, batch: float, context_tokens: float) -> float:
        """Return T_decode of a batch whose requests hold `context_tokens` on average."""
        per_request = self.seconds_per_request + self.seconds_per_context_token * context_tokens
        return self.base_seconds + per_request * batch

    def times(self, factor: float) -> DecodeProfile:
        """Return the profile of hardware that takes `factor` times as long."""
        return replace(
            self,
            base_seconds=self.base_seconds * factor,
            seconds_per_request=self.seconds_per_request * factor,
            seconds_per_context_token=self.seconds_per_context_token * factor,
        )


@dataclass(frozen=True)
class Profile:
    """Times of one instance of one kind of hardware serving one model.

    `kv_memory_bytes` bounds the decode batch; None means no limit. `inferred` names the parts that were not measured.
    `fit_error` is the greatest relative distance between the prefill curve and its points. `model` is the measured
    model, if it is known. `sharing` are the measured speeds of both phases at once.
    """

    name: str
    hardware: str
    prefill: PrefillProfile
    decode: DecodeProfile | None
    source: str
    gpus_per_instance: int = 1
    kv_memory_bytes: float | None = None
    inferred: tuple[str, ...] = ()
    fit_error: float = 0.0
    model: str = ""
    sharing: SharingSpeeds | None = None


def fit_decode(batches: list[float], contexts: list[float], seconds: list[float]) -> DecodeProfile:
    """Return the plane with the least relative errors at measured steps. With one context only, context tokens cost nothing.

    Raises:
        ValueError: fewer than two batches, or steps that no rising plane fits.
    """
    if len(set(batches)) < 2:
        raise ValueError("decode steps at two batch sizes at least are needed")
    batch, context = np.asarray(batches, dtype=float), np.asarray(contexts, dtype=float)
    columns = [np.ones_like(batch), batch] + ([batch * context] if len(set(contexts)) > 1 else [])
    stacked, steps = np.column_stack(columns), np.asarray(seconds, dtype=float)
    solution = nonnegative_fit(stacked, steps)
    if np.abs(stacked @ np.array(solution) / steps - 1.0).max() > _POOR:
        raise ValueError("the measured steps fall with the batch or the context; no plane fits them")
    base, per_request, per_token = (*solution, 0.0)[:3]
    return DecodeProfile(base, per_request, per_token, max_batch=int(max(batches)))
