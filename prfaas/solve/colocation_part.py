"""The part of a profile that says how prefill and decode share one device: points by share of its compute."""

from __future__ import annotations

from dataclasses import dataclass

from prfaas.config import records, setting
from prfaas.model.colocation import Colocation, Interference, SharedPrefill, ShareTable
from prfaas.solve.quantities import NUMBER


@dataclass(frozen=True)
class DecodeOnShare:
    """One measurement, beside a prefill that runs on the rest."""

    batch: int = setting("count", required=True, minimum=1, doc="Requests in the batch.")
    share: float = setting("ratio", required=True, doc="Decode's share of the compute units; 1: both may use all.")
    step: float = setting("seconds", required=True, minimum=1e-9, doc="How long one step took.")


@dataclass(frozen=True)
class PrefillOnShare:
    """One measurement, beside decode steps that run on the rest."""

    tokens: int = setting("tokens", required=True, minimum=1, doc="Tokens of the prompt.")
    share: float = setting("ratio", required=True, doc="Prefill's share of the compute units; 1: both may use all.")
    seconds: float = setting("seconds", required=True, minimum=1e-9, doc="How long the prefill took.")


@dataclass(frozen=True)
class InterferencePoint:
    """What one kind of prefill does to decode steps where both may use everything."""

    batch: int = setting("count", required=True, minimum=1, doc="Requests in the decode batch.")
    tokens: int = setting("tokens", required=True, minimum=1, doc="New tokens of the prefill.")
    cached: int = setting("tokens", default=0, doc="Cached tokens before them; 0 is a full prefill.")
    ratio: float = setting(NUMBER, required=True, doc="A step's seconds beside it over those without it.")


@dataclass(frozen=True)
class ColocationPart:
    """One device that prefills and decodes at once."""

    partition: str = setting("text", default="", doc="How the compute units were divided.")
    context: int = setting("tokens", default=0, doc="Tokens that each decoding request held.")
    decode: tuple[DecodeOnShare, ...] = setting(records(DecodeOnShare), default=(), doc="T_decode by share.")
    prefill: tuple[PrefillOnShare, ...] = setting(records(PrefillOnShare), default=(), doc="T_prefill by share.")
    interference: tuple[InterferencePoint, ...] = setting(
        records(InterferencePoint), default=(), doc="Full and append-prefills beside decode."
    )


def colocation(part: ColocationPart) -> Colocation:
    """The part as solver, twin and executor use it.

    Raises:
        ValueError: the decode points are no grid of batches and shares.
    """
    seconds = {(point.batch, point.share): point.step for point in part.decode}
    batches = tuple(sorted({batch for batch, _ in seconds}))
    shares = tuple(sorted({share for _, share in seconds} - {1.0}))
    try:
        rows = tuple(tuple(seconds[batch, share] for share in shares) for batch in batches)
        table = ShareTable(shares, batches, rows, tuple(seconds[batch, 1.0] for batch in batches))
    except KeyError as error:
        batch, share = error.args[0]
        raise ValueError(f"colocation: decode: no point for a batch of {batch} on a share of {share:g}") from error
    return Colocation(
        part.partition,
        part.context,
        table,
        tuple(SharedPrefill(point.tokens, point.share, point.seconds) for point in part.prefill),
        tuple(Interference(point.batch, point.tokens, point.cached, point.ratio) for point in part.interference),
    )
