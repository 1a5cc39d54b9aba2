"""Files of a deployment on two machines: west decodes and serves clients, east prefills. `prfaas init` writes them."""

import json
import os
import secrets
import shlex
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from prfaas.config import load_file, setting
from prfaas.console.authority import DAY, LOOPBACK, Authority
from prfaas.errors import ConfigError
from prfaas.grants import MIN_SECRET_BYTES
from prfaas.units import join_address

SiteName = Literal["west", "east"]
ANSWERS = "deployment.yaml"
ENGINE_SCRIPT = "engine.sh"
ENGINE_URL = "http://127.0.0.1:8000"
CERTIFICATE_DAYS = 825
WIRE_PORT, MANAGER_PORT, ROUTER_PORT, ENGINE_PORT = 7400, 7410, 8080, 8443
_CERTIFICATES: dict[SiteName, tuple[str, ...]] = {
    "west": ("west-0", "manager", "router", "operator"),
    "east": ("east-0",),
}
_HEADER = "# Written by `prfaas init`. Every setting: docs/configuration.md\n"


@dataclass(frozen=True)
class Answers:
    """Facts of a deployment that both machines share."""

    west: str = setting("text", required=True, doc="Address of the machine that decodes and serves clients.")
    east: str = setting("text", required=True, doc="Address of the machine that prefills.")
    model: str = setting("text", required=True, doc="Model folder, or its name at a hub, as vLLM takes it.")
    served_name: str = setting("text", required=True, doc="Served model name.")

    def address(self, site: SiteName) -> str:
        return self.west if site == "west" else self.east


def read_answers(folder: Path) -> Answers | None:
    """Return the facts that the other machine wrote, or None in a new folder.

    Raises:
        ConfigError: the folder holds a site already, or something else.
    """
    if not folder.exists():
        return None
    if (folder / "agent.yaml").exists():
        raise ConfigError(f"{folder} holds a site already; name another folder")
    if not (folder / ANSWERS).exists():
        raise ConfigError(f"{folder} exists and was not copied from the other machine; name another folder")
    return load_file(Answers, folder / ANSWERS)


def write_site(site: SiteName, folder: Path, answers: Answers, *, pool: str) -> Path | None:
    """Write every file of a site. Return the folder to copy to the other machine, or None if this machine is the second.

    Raises:
        ConfigError: an answer cannot be used.
        OSError: the folder cannot be written.
    """
    folder = folder.resolve()
    is_first = not folder.exists()
    for directory in (folder, folder / "tls", folder / "run"):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    share = _create_secrets(site, folder, answers) if is_first else None
    if site == "west":
        _write_keys(folder)
        _write_yaml(folder / "manager.yaml", _manager(folder, answers))
        _write_yaml(folder / "router.yaml", _router(folder, answers))
    _write_yaml(folder / "agent.yaml", _agent(site, folder, answers, pool))
    _write_yaml(folder / "console.yaml", _console(site, folder, answers))
    _write(folder / ENGINE_SCRIPT, _engine_script(site, folder, answers), mode=0o700)
    return share


def _create_secrets(site: SiteName, folder: Path, answers: Answers) -> Path:
    """Create secret, authority and certificates, and the other machine's share of them. The authority's key stays here."""
    peer: SiteName = "east" if site == "west" else "west"
    share = folder / f"for-{peer}"
    for directory in (share, share / "tls"):
        directory.mkdir(mode=0o700)
    _write(folder / "secret", secrets.token_hex(MIN_SECRET_BYTES))
    authority = Authority(folder / "tls")
    for end in (site, peer):
        for name in _CERTIFICATES[end]:
            authority.issue(name, valid_for=CERTIFICATE_DAYS * DAY, hosts=(*LOOPBACK, answers.address(end)))
    for name in _CERTIFICATES[peer]:
        for suffix in (".pem", ".key"):
            shutil.move(folder / "tls" / (name + suffix), share / "tls" / (name + suffix))
    for name in ("secret", "tls/authority.pem", "tls/authority.crl"):
        shutil.copy(folder / name, share / name)
    for directory in (folder, share):
        _write_yaml(directory / ANSWERS, asdict(answers))
    return share


def _write_keys(folder: Path) -> None:
    for name in ("api-keys", "operator-keys"):
        _write(folder / name, secrets.token_urlsafe(24) + "\n")


def _tls(folder: Path, name: str) -> dict[str, str]:
    directory = folder / "tls"
    files = {"authority": "authority.pem", "certificate": f"{name}.pem", "key": f"{name}.key"}
    return {key: str(directory / file) for key, file in (files | {"revocations": "authority.crl"}).items()}


def _manager(folder: Path, answers: Answers) -> dict[str, Any]:
    return {
        "listen": join_address(answers.west, MANAGER_PORT),
        "secret_file": str(folder / "secret"),
        "redis_directory": str(folder / "run" / "redis"),
        "threshold_tokens": "16K",
        "tls": _tls(folder, "manager"),
    }


def _router(folder: Path, answers: Answers) -> dict[str, Any]:
    tls = _tls(folder, "router")
    return {
        "listen": join_address(answers.west, ROUTER_PORT),
        "cluster": "west",
        "managers": [join_address(answers.west, MANAGER_PORT)],
        "secret_file": str(folder / "secret"),
        "api_keys_file": str(folder / "api-keys"),
        "operator_keys_file": str(folder / "operator-keys"),
        "tls": tls,
        "engine_tls": "deployment",
        "client_tls": {name: tls[name] for name in ("certificate", "key")},
    }


def _agent(site: SiteName, folder: Path, answers: Answers, pool: str) -> dict[str, Any]:
    name, address = f"{site}-0", answers.address(site)
    engine = {"instance": name, "url": ENGINE_URL, "tls_listen": join_address(address, ENGINE_PORT)}
    return {
        "name": name,
        "socket": str(folder / "run" / "agent.sock"),
        "listen": join_address(address, WIRE_PORT),
        "secret_file": str(folder / "secret"),
        "pool_bytes": pool,
        "managers": [join_address(answers.west, MANAGER_PORT)],
        "cluster": site,
        "cluster_kind": "pd" if site == "west" else "prfaas",
        "engines": [{**engine, "role": "both" if site == "west" else "prefill", "model": answers.served_name}],
        "tls": _tls(folder, name),
    }


def _console(site: SiteName, folder: Path, answers: Answers) -> dict[str, Any]:
    """Return the console's settings. The manager's pages are on west's loopback, so east names none."""
    name = "operator" if site == "west" else "east-0"
    router = {"router_key_file": str(folder / "operator-keys")} if site == "west" else {}
    return {
        "name": name,
        "managers": [join_address(answers.west, MANAGER_PORT)],
        "routers": [f"https://{join_address(answers.west, ROUTER_PORT)}"],
        "secret_file": str(folder / "secret"),
        "tls": _tls(folder, name),
        **router,
    }


def _engine_script(site: SiteName, folder: Path, answers: Answers) -> str:
    transfer = {
        "kv_connector": "PrfaasConnector",
        "kv_role": "kv_both" if site == "west" else "kv_producer",
        "kv_load_failure_policy": "recompute",
        "engine_id": f"{site}-0",
        "kv_connector_extra_config": {"agent_socket": str(folder / "run" / "agent.sock")},
    }
    command = ["vllm", "serve", answers.model, "--served-model-name", answers.served_name]
    command += ["--host", "127.0.0.1", "--port", "8000", "--enable-prefix-caching"]
    command += ["--kv-transfer-config", json.dumps(transfer)]
    return f'#!/bin/sh\n# Add flags of vLLM here, such as --tensor-parallel-size.\nexec {shlex.join(command)} "$@"\n'


def _write_yaml(path: Path, values: dict[str, Any]) -> None:
    _write(path, _HEADER + yaml.safe_dump(values, sort_keys=False))


def _write(path: Path, text: str, *, mode: int = 0o600) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w", encoding="utf-8") as file:
        file.write(text)
