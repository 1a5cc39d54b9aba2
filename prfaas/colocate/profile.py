"""Profiles: times against the share of compute and interference, measured once per device and model, kept as YAML.

The decode table is what the adaptive resource manager reads; solver and twin read all of it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from prfaas.errors import ConfigError
from prfaas.scheduler.colocation import DecodeProfile


@dataclass(frozen=True)
class PrefillTime:
    """Seconds of a whole prompt on a share of compute, with decode idle."""

    num_tokens: int
    share: float
    seconds: float


@dataclass(frozen=True)
class Interference:
    """What a prefill that competes for everything does to a decode step, as step seconds with it over those without.

    `num_cached_tokens` of 0 is a full prefill, else an append-prefill.
    """

    decode_batch: int
    num_new_tokens: int
    num_cached_tokens: int
    ratio: float


@dataclass(frozen=True)
class ColocationProfile:
    """`context_tokens` is the context of each decoding request in the decode table."""

    device: str
    model: str
    dtype: str
    date: str
    method: str
    context_tokens: int
    decode: DecodeProfile
    prefill: tuple[PrefillTime, ...]
    interference: tuple[Interference, ...]


def write(profile: ColocationProfile, path: Path) -> None:
    path.write_text(yaml.safe_dump(_plain(dataclasses.asdict(profile)), sort_keys=False, width=120))


def read(path: Path) -> ColocationProfile:
    """The profile in a file.

    Raises:
        ConfigError: it cannot be read, misses a field or holds one that we do not know.
    """
    try:
        plain = yaml.safe_load(path.read_text())
        decode = plain.pop("decode")
        seconds = tuple(tuple(map(float, row)) for row in decode.pop("seconds"))
        table = DecodeProfile(seconds=seconds, **{name: tuple(values) for name, values in decode.items()})
        prefill = tuple(PrefillTime(**row) for row in plain.pop("prefill"))
        interference = tuple(Interference(**row) for row in plain.pop("interference"))
        return ColocationProfile(decode=table, prefill=prefill, interference=interference, **plain)
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path}: not a colocation profile: {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return round(value, 7) if isinstance(value, float) else value
