"""A measured profile as the file that planner, twin and partition manager read (`prfaas/solve/files/profile_file.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from prfaas.model.cost.colocation import Colocation


@dataclass(frozen=True)
class PrefillTime:
    """Seconds of a prompt of `num_tokens` with the whole device and nothing beside it."""

    num_tokens: int
    seconds: float


@dataclass(frozen=True)
class StepTime:
    """Seconds of a decode step with the whole device and nothing beside it."""

    batch: int
    context_tokens: int
    seconds: float


@dataclass(frozen=True)
class Measured:
    """Everything that one measurement yields."""

    hardware: str
    model: str
    source: str
    prefill: tuple[PrefillTime, ...]
    decode: tuple[StepTime, ...]
    colocation: Colocation


def write(measured: Measured, path: Path) -> None:
    """Write the file, whole or not at all; its name is the profile's."""
    text = yaml.safe_dump(_plain(measured, name=path.stem), sort_keys=False, width=120)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _plain(measured: Measured, *, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "hardware": measured.hardware,
        "model": measured.model,
        "source": measured.source,
        "prefill": {
            "fit": "quadratic",
            "points": [
                {"tokens": item.num_tokens, "cached": 0, "seconds": _seconds(item.seconds)} for item in measured.prefill
            ],
        },
        "decode": {
            "points": [
                {"batch": item.batch, "context": item.context_tokens, "step": _seconds(item.seconds)}
                for item in measured.decode
            ]
        },
        "colocation": _colocation(measured.colocation),
    }


def _colocation(measured: Colocation) -> dict[str, Any]:
    table = measured.decode
    decode = [
        {"batch": batch, "share": share, "step": _seconds(step)}
        for batch, row, together in zip(table.batches, table.seconds, table.overallocated_seconds, strict=True)
        for share, step in (*zip(table.shares, row, strict=True), (1.0, together))
    ]
    return {
        "partition": measured.partition,
        "context": measured.context_tokens,
        "decode": decode,
        "prefill": [
            {"tokens": item.num_tokens, "share": item.share, "seconds": _seconds(item.seconds)}
            for item in measured.prefill
        ],
        "interference": [
            {
                "batch": item.decode_batch,
                "tokens": item.num_new_tokens,
                "cached": item.num_cached_tokens,
                "ratio": round(item.ratio, 4),
            }
            for item in measured.interference
        ],
    }


def _seconds(value: float) -> float:
    return round(value, 7)
