"""Models, profiles and deployments that come with the package, and the user's files in the same forms."""

import json
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from prfaas.errors import ConfigError
from prfaas.model.cost.profile import Profile
from prfaas.model.cost.roofline import Gpu
from prfaas.model.kv import huggingface
from prfaas.model.kv.geometry import Geometry, GroupBytes
from prfaas.solve.files.profile_file import read_profile

FOLDER = Path(__file__).parents[1] / "catalog"
CASE_STUDY = "prfaas-case-study"
_VARIANTS = frozenset({
    "instruct", "thinking", "base", "chat", "it", "fp8", "bf16", "nvfp4", "awq", "gptq", "preview", "hf", "128e", "16e",
})  # fmt: skip


def names(kind: Literal["models", "profiles", "deployments"]) -> list[str]:
    """Return the names of the catalog's entries of one kind."""
    return sorted(entry.stem for entry in (FOLDER / kind).iterdir())


def deployment_path(name: str) -> Path:
    """Return the file of a catalogued deployment."""
    return FOLDER / "deployments" / f"{name}.yaml"


def find_model(name: str, *, beside: Path | None = None, kv_dtype: str = "auto") -> Geometry:
    """Return the geometry of a catalogued model, or of a Hugging Face config.json; paths are relative to `beside`.

    A catalogued model is found by its name on Hugging Face too, or by the start of its name if only one starts so.
    `kv_dtype` is the type of keys and values; "auto" takes the model's own type.

    Raises:
        ConfigError: the model is not found, or a kind of attention is unknown.
    """
    path = _path(name, beside)
    if not path.is_file():
        known = _model_named(name)
        return _catalogued(known, json.loads(_entry(known).read_text(encoding="utf-8")), kv_dtype)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: not a config.json: an object is expected")
    own_name = str(config.get("_name_or_path") or path.stem)
    return huggingface.geometry(config, name=own_name, source=str(path), kv_dtype=kv_dtype)


def _entry(name: str) -> Path:
    return FOLDER / "models" / f"{name}.json"


def _model_named(name: str) -> str:
    """Return the catalogued model that is meant by a name.

    Raises:
        ConfigError: no model, or several models have such a name.
    """
    if _entry(name).is_file():
        return name
    asked = _plain_name(name)
    known = {_plain_name(entry): entry for entry in names("models")}
    if asked in known:
        return known[asked]
    found = sorted(entry for plain, entry in known.items() if plain.startswith(f"{asked}-"))
    if len(found) == 1:
        return found[0]
    similar = found or get_close_matches(name, names("models"), n=3, cutoff=0.5) or names("models")
    raise ConfigError(f"model {name!r}: no such file and no such model; the catalog has {', '.join(similar)}")


def _plain_name(name: str) -> str:
    """Return a model's name without its organisation and without words for variants of the same shape."""
    words = name.rpartition("/")[2].lower().split("-")
    while len(words) > 1 and (words[-1] in _VARIANTS or words[-1].isdigit()):
        words.pop()
    return "-".join(words)


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


def find_gpu(name: str) -> Gpu:
    """Return the peaks of a GPU.

    Raises:
        ConfigError: the GPU is not in the table.
    """
    gpus = json.loads((FOLDER / "gpus.json").read_text(encoding="utf-8"))["gpus"]
    known = {entry.lower(): entry for entry in gpus}
    if name.lower() not in known:
        raise ConfigError(f"hardware {name!r}: none of {', '.join(gpus)}; name a measured profile")
    entry = known[name.lower()]
    return Gpu(entry, **gpus[entry])


def profile_of_model(profile: Profile, model: Geometry, *, cluster: str) -> Profile:
    """Return a profile for `model`. Mark it as inferred if the catalog does not know the model that was measured.

    Raises:
        ConfigError: the profile was measured with another model of the catalog.
    """
    if profile.model in ("", model.name):
        return profile
    try:
        measured, served = _model_named(profile.model), _model_named(model.name)
    except ConfigError:
        assumed = f"that {profile.model!r} of profile {profile.name} is {model.name}"
        return replace(profile, inferred=(*profile.inferred, assumed))
    if measured == served:
        return profile
    raise ConfigError(
        f"cluster {cluster!r}: profile {profile.name!r} is of {measured}, but the deployment serves {served}; "
        f"write hardware: {profile.hardware} in place of the profile for an inferred one"
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
