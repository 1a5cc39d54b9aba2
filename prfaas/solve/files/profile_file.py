"""Profile files (YAML): measured times of prefill, decode, and both at once on one device."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import ClassVar

import numpy as np

from prfaas import config
from prfaas.config import record, records, setting
from prfaas.errors import ConfigError
from prfaas.model.cost.colocation import Line, ShareTable, SharingSpeeds
from prfaas.model.cost.curve import Curve, fitted, polynomial, through, weighted
from prfaas.model.cost.profile import DecodeProfile, PrefillProfile, Profile, fit_decode
from prfaas.solve.files.quantities import NUMBER
from prfaas.units import choice


@dataclass(frozen=True)
class DecodeOnShare:
    """Measured decode step during a prefill on the rest of the device."""

    batch: int = setting("count", required=True, minimum=1, doc="Requests in the batch.")
    share: float = setting("ratio", required=True, doc="Decode's share of the compute units; 1: both may use all.")
    step: float = setting("seconds", required=True, minimum=1e-9, doc="Seconds of one step.")


@dataclass(frozen=True)
class PrefillOnShare:
    """Measured prefill during decode steps on the rest of the device."""

    tokens: int = setting("tokens", required=True, minimum=1, doc="Tokens of the prompt.")
    share: float = setting("ratio", required=True, doc="Prefill's share of the compute units; 1: both may use all.")
    seconds: float = setting("seconds", required=True, minimum=1e-9, doc="Seconds of the prefill.")


@dataclass(frozen=True)
class ColocationPart:
    """Measurements of a device that prefills and decodes at once."""

    REMOVED_SETTINGS: ClassVar[dict[str, str]] = {"interference": "the points at a share of 1 say the same"}

    partition: str = setting("text", default="", doc="Mechanism that divided the compute units.")
    context: int = setting("tokens", default=0, doc="Tokens that each decoding request held.")
    decode: tuple[DecodeOnShare, ...] = setting(records(DecodeOnShare), default=(), doc="T_decode by share.")
    prefill: tuple[PrefillOnShare, ...] = setting(records(PrefillOnShare), default=(), doc="T_prefill by share.")


def _share_table(measured: ColocationPart) -> ShareTable:
    """Return decode's grid of batches and shares. Raise ValueError where a point is missing.

    Over-allocation is ruled out if prefill is slower with it than with its least share. This happens on few cores,
    where two teams of threads wait for each other.
    """
    seconds = {(point.batch, point.share): point.step for point in measured.decode}
    batches = tuple(sorted({batch for batch, _ in seconds}))
    shares = tuple(sorted({share for _, share in seconds} - {1.0}))
    slowest = max((point.seconds for point in measured.prefill if point.share < 1.0), default=math.inf)
    is_allowed = all(point.seconds <= slowest for point in measured.prefill if point.share == 1.0)
    try:
        rows = tuple(tuple(seconds[batch, share] for share in shares) for batch in batches)
        overallocated = tuple(seconds[batch, 1.0] if is_allowed else math.inf for batch in batches)
    except KeyError as error:
        batch, share = error.args[0]
        raise ValueError(f"colocation: decode: no point for a batch of {batch} on a share of {share:g}") from error
    return ShareTable(shares, batches, rows, overallocated)


@dataclass(frozen=True)
class PrefillPoint:
    """Measured prefill."""

    tokens: int = setting("tokens", required=True, minimum=1, doc="New tokens of the prompt.")
    cached: int = setting("tokens", default=0, doc="Tokens before them that were cached.")
    seconds: float = setting("seconds", required=True, minimum=1e-9, doc="Seconds of the prefill.")


@dataclass(frozen=True)
class PrefillPart:
    """T_prefill as points or coefficients."""

    fit: str = setting(
        choice("quadratic", "weighted", "interpolate", "coefficients"),
        default="quadratic",
        doc="Least squares, least relative errors, straight lines between the points, or given coefficients.",
    )
    points: tuple[PrefillPoint, ...] = setting(records(PrefillPoint), default=(), doc="The measurements.")
    seconds: float = setting(NUMBER, default=0.0, doc="Coefficient of 1.")
    seconds_per_token: float = setting(NUMBER, default=0.0, doc="Coefficient of l.")
    seconds_per_token_squared: float = setting(NUMBER, default=0.0, doc="Coefficient of l².")
    min_tokens: int | None = setting("tokens", default=None, doc="Shortest length that coefficients stand for.")
    max_tokens: int | None = setting("tokens", default=None, doc="Longest length that coefficients stand for.")


@dataclass(frozen=True)
class DecodePoint:
    """Measured decode step."""

    batch: int = setting("count", required=True, minimum=1, doc="Requests in the batch.")
    context: int = setting("tokens", default=0, doc="Tokens that each request holds.")
    step: float = setting("seconds", required=True, minimum=1e-9, doc="Seconds of one step.")


@dataclass(frozen=True)
class DecodePart:
    """T_decode as points."""

    points: tuple[DecodePoint, ...] = setting(records(DecodePoint), default=(), doc="The measurements.")


@dataclass(frozen=True)
class ProfileFile:
    """Profile of one instance of one kind of hardware serving one model."""

    name: str = setting("text", required=True, doc="Name of the profile.")
    hardware: str = setting("text", required=True, doc="Kind of GPU.")
    model: str = setting("text", default="", doc="Model used for the measurement.")
    source: str = setting("text", required=True, doc="Origin of the figures.")
    gpus_per_instance: int = setting("count", default=1, minimum=1, doc="GPUs of one instance.")
    kv_memory: int | None = setting("bytes", default=None, doc="Memory for KV of one instance; empty: no limit.")
    inferred: tuple[str, ...] = setting("text_list", default=(), doc="Parts that were not measured.")
    prefill: PrefillPart = setting(record(PrefillPart), doc="T_prefill.")
    decode: DecodePart = setting(record(DecodePart), doc="T_decode; needed on PD clusters.")
    colocation: ColocationPart = setting(record(ColocationPart), doc="Prefill and decode at once on one device.")


def read_profile(file: Path) -> Profile:
    """Return the profile of a YAML file.

    Raises:
        ConfigError: the file cannot be read, or its points do not make a curve.
    """
    written = config.load_file(ProfileFile, file)
    try:
        (prefill, error), decode = _prefill(written.prefill), _decode(written.decode)
        return Profile(
            name=written.name,
            hardware=written.hardware,
            prefill=prefill,
            decode=decode,
            source=written.source,
            gpus_per_instance=written.gpus_per_instance,
            kv_memory_bytes=written.kv_memory,
            inferred=tuple(f"{part} of {written.name}" for part in written.inferred),
            fit_error=error,
            model=written.model,
            sharing=_sharing(written.colocation, prefill, decode) if decode and written.colocation.decode else None,
        )
    except ValueError as error:
        raise ConfigError(f"{file}: {error}") from error


def read_colocation(file: Path) -> ShareTable:
    """Return a profile's decode steps beside a prefill on the same device.

    Raises:
        ConfigError: the file cannot be read, has no such measurements, or its points are no grid.
    """
    written = config.load_file(ProfileFile, file)
    try:
        return _share_table(written.colocation)
    except ValueError as error:
        raise ConfigError(f"{file}: {error}") from error


def _sharing(measured: ColocationPart, prefill: PrefillProfile, decode: DecodeProfile) -> SharingSpeeds:
    """Return the measured speeds of both phases on one device: decode by batch, prefill as medians over prompt lengths."""
    table = _share_table(measured)
    alone = [decode.step_seconds(batch, measured.context) for batch in table.batches]
    by_share: dict[float, list[float]] = {}
    for point in measured.prefill:
        by_share.setdefault(point.share, []).append(prefill.seconds(point.tokens) / point.seconds)
    if 1.0 not in by_share:
        raise ValueError("colocation: prefill: no point with a share of 1, which is over-allocation")
    speeds = {share: min(1.0, median(found)) for share, found in sorted(by_share.items())}
    columns = zip(table.shares, zip(*table.seconds, strict=True), strict=True)
    return SharingSpeeds(
        tuple((share, _speeds_by_batch(table.batches, alone, column)) for share, column in columns),
        tuple((share, speed) for share, speed in speeds.items() if share < 1.0),
        _speeds_by_batch(table.batches, alone, table.overallocated_seconds),
        speeds[1.0],
        table.shares,
    )


def _speeds_by_batch(batches: Sequence[int], alone: Sequence[float], shared: Sequence[float]) -> Line:
    """Return the speed of each batch, at most 1, since only noise exceeds it."""
    steps = zip(batches, alone, shared, strict=True)
    return tuple((float(batch), min(1.0, before / after)) for batch, before, after in steps)


def _prefill(part: PrefillPart) -> tuple[PrefillProfile, float]:
    if part.fit == "coefficients":
        if not part.min_tokens or not part.max_tokens or part.min_tokens >= part.max_tokens:
            raise ValueError("prefill: coefficients need min_tokens below max_tokens")
        curve = polynomial(part.seconds, part.seconds_per_token, part.seconds_per_token_squared)
        return PrefillProfile(_rising(curve, part.min_tokens, part.max_tokens), part.min_tokens, part.max_tokens), 0.0
    fresh = sorted((point.tokens, point.seconds) for point in part.points if not point.cached)
    if not fresh:
        raise ValueError("prefill: no points without a cached prefix")
    tokens, seconds = [float(length) for length, _ in fresh], [taken for _, taken in fresh]
    curve = {"quadratic": fitted, "weighted": weighted, "interpolate": through}[part.fit](tokens, seconds)
    error = max(abs(curve(length) / taken - 1) for length, taken in zip(tokens, seconds, strict=True))
    return PrefillProfile(_rising(curve, tokens[0], tokens[-1]), tokens[0], tokens[-1], _append(part.points)), error


def _rising(curve: Curve, low: float, high: float) -> Curve:
    """Return `curve`, or raise ValueError if it is not positive and rising within its range."""
    lengths = np.linspace(low, high, 257)
    values = curve.many(lengths)
    if not math.isfinite(values.sum()) or values.min() <= 0 or (np.diff(values) < -1e-9 * values.max()).any():
        raise ValueError("prefill: the time is not positive and rising over its range; check the points")
    return curve


def _append(points: tuple[PrefillPoint, ...]) -> tuple[float, float, float, float] | None:
    """Return the fit a + b m + c m² + d m n through at least four points with a cached prefix."""
    behind = [point for point in points if point.cached]
    if not behind:
        return None
    if len(behind) < 4:
        raise ValueError(f"prefill: {len(behind)} points with a cached prefix; give none or at least four")
    new, cached = (np.array([getattr(point, name) / 1e3 for point in behind]) for name in ("tokens", "cached"))
    columns = np.column_stack((np.ones_like(new), new, new**2, new * cached))
    a, b, c, d = map(float, np.linalg.lstsq(columns, np.array([point.seconds for point in behind]), rcond=None)[0])
    return a, b / 1e3, c / 1e6, d / 1e6


def _decode(part: DecodePart) -> DecodeProfile | None:
    if not part.points:
        return None
    rows = part.points
    return fit_decode([float(p.batch) for p in rows], [float(p.context) for p in rows], [p.step for p in rows])
