"""Safe defaults: every address is loopback, and open ports beyond it stop the start."""

import importlib
from pathlib import Path
from typing import Any

import pytest

from prfaas import config
from prfaas.units import is_loopback, split_address
from tests.support.secret_files import write_deployment_secret
from tools.reference_tables import COMPONENTS

ADDRESSES = [
    (component, name)
    for component, cls in COMPONENTS.items()
    for name, spec in config.settings(cls)
    if name.endswith("listen")
]


@pytest.mark.parametrize(("component", "name"), ADDRESSES)
def test_every_address_defaults_to_loopback_or_none(component: str, name: str) -> None:
    default = config.default(COMPONENTS[component], name)
    assert default == "" or is_loopback(split_address(default)[0])


def _at_default_hosts(component: str) -> dict[str, str]:
    """Return the component's own addresses at free ports of their default hosts."""
    defaults = {name: config.default(COMPONENTS[component], name) for owner, name in ADDRESSES if owner == component}
    return {name: f"{split_address(address)[0]}:0" for name, address in defaults.items() if address}


OPEN = {
    "manager": ["listen", "http_listen"],
    "agent": ["listen", "status_listen"],
    "router": ["listen", "ext_proc_listen"],
    "sidecar": ["listen", "status_listen"],
    "colocate": ["listen"],
}


BEYOND = ("beyond loopback", "not a private address")


@pytest.mark.parametrize(("component", "name"), [(component, name) for component in OPEN for name in OPEN[component]])
def test_open_port_beyond_loopback_stops_the_start(
    component: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = write_deployment_secret(tmp_path)
    words = _words(component, {**_at_default_hosts(component), name: "0.0.0.0:0"}, secret, tmp_path)
    assert _checked(component, words) == 2
    error = capsys.readouterr().err
    assert any(words in error for words in BEYOND), error


def _words(component: str, addresses: dict[str, str], secret: Path, directory: Path) -> list[str]:
    flags: dict[str, Any] = {**addresses}
    if component not in ("sidecar", "colocate"):
        flags["secret_file"] = secret
    if component == "agent":
        flags |= {"name": "west-0", "socket": directory / "agent.sock", "pool_bytes": "1MiB"}
    if component == "router":
        flags |= {"managers": "127.0.0.1:9"}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    return ["serve", *words] if component == "colocate" else words


def _checked(component: str, words: list[str]) -> int:
    """Return the status with which the component's command ends that only looks at its settings."""
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"prfaas.cli.{component}").main([*words, "--check-config"])
    return int(str(ended.value.code))


def test_explicit_consent_allows_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret = write_deployment_secret(tmp_path)
    for component, names in OPEN.items():
        addresses = {name: f"0.0.0.0:{port}" for port, name in enumerate(names, 7990)}
        words = _words(component, addresses, secret, tmp_path)
        assert _checked(component, [*words, "--insecure-plaintext"]) == 0, capsys.readouterr().err
