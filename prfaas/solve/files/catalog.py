"""Models, profiles and deployments that come with the package, and the user's files in the same forms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from prfaas.errors import ConfigError
from prfaas.model.cost.profile import Profile
from prfaas.model.kv import huggingface
from prfaas.model.kv.geometry import Geometry, GroupBytes
from prfaas.solve.files.profile_file import read_profile

FOLDER = Path(__file__).parents[1] / "catalog"
CASE_STUDY = "prfaas-case-study"


def names(kind: Literal["models", "profiles", "deployments"]) -> list[str]:
    """Return the names of the catalog's entries of one kind."""
    return sorted(entry.stem for entry in (FOLDER / kind).iterdir())


def deployment_path(name: str) -> Path:
    """Return the file of a catalogued deployment."""
    return FOLDER / "deployments" / f"{name}.yaml"


def find_model(name: str, *, beside: Path | None = None, kv_dtype: str = "auto") -> Geometry:
    """Return the geometry of a catalogued model, or of a Hugging Face config.json; paths are relative to `beside`.

    `kv_dtype` is the type of keys and values; "auto" takes the model's own type.

    Raises:
        ConfigError: the model is not found, or a kind of attention is unknown.
    """
    entry = FOLDER / "models" / f"{name}.json"
    if "/" not in name and entry.is_file():
        return _catalogued(name, json.loads(entry.read_text(encoding="utf-8")), kv_dtype)
    path = _path(name, beside)
    if not path.is_file():
        raise ConfigError(f"model {name!r}: no such file, and none of the catalog's: {', '.join(names('models'))}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: not a config.json: an object is expected")
    own_name = str(config.get("_name_or_path") or path.stem)
    return huggingface.geometry(config, name=own_name, source=str(path), kv_dtype=kv_dtype)


def _catalogued(name: str, entry: dict[str, Any], kv_dtype: str) -> Geometry:
    inferred = tuple(entry.get("inferred", ()))
    if "groups" in entry:
        if kv_dtype != "auto":
            raise ConfigError(f"model {name!r}: its geometry is not known in parts; kv_dtype must be auto")
        groups = tuple(GroupBytes(**group) for group in entry["groups"])
        return Geometry(name, groups, entry["source"], inferred)
    return huggingface.geometry(
        entry["config"], name=name, source=entry["source"], kv_dtype=kv_dtype, inferred=inferred
    )


def find_profile(name: str, *, beside: Path | None = None) -> Profile:
    """Return a catalogued profile, or the profile of a YAML file.

    Raises:
        ConfigError: the profile is not found, or its file is malformed.
    """
    entry = FOLDER / "profiles" / f"{name}.yaml"
    if "/" not in name and entry.is_file():
        return read_profile(entry)
    path = _path(name, beside)
    if not path.is_file():
        raise ConfigError(f"profile {name!r}: no such file, and none of the catalog's: {', '.join(names('profiles'))}")
    return read_profile(path)


def _path(name: str, beside: Path | None) -> Path:
    path = Path(name).expanduser()
    return path if beside is None or path.is_absolute() else beside / path
