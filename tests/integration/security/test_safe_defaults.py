"""With the defaults nothing listens beyond loopback, and nothing starts there that lets everybody in."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prfaas import config
from prfaas.units import is_loopback, split_address
from tests.integration.security.listening import Listening, is_taken, listening_of
from tools.processes import Child, Children
from tools.reference_tables import COMPONENTS
from tools.stack import Stack

ADDRESSES = [
    (component, name)
    for component, cls in COMPONENTS.items()
    for name, its in config.settings(cls)
    if name.endswith("listen")
]


@pytest.mark.parametrize(("component", "name"), ADDRESSES)
def test_the_default_of_every_address_is_loopback_or_none(component: str, name: str) -> None:
    default = config.default(COMPONENTS[component], name)
    assert default == "" or is_loopback(split_address(default)[0])


def _at_default_hosts(component: str) -> dict[str, str]:
    """The component's own addresses at free ports of their default hosts."""
    defaults = {name: config.default(COMPONENTS[component], name) for its, name in ADDRESSES if its == component}
    return {name: f"{split_address(its)[0]}:0" for name, its in defaults.items() if its}


def test_the_processes_of_a_deployment_listen_on_loopback_alone(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        stack = Stack(children, tmp_path)
        manager, address, url = stack.start_manager()
        stack.await_server(manager, url, path="/healthz")
        agent = stack.start_agent("west-0", managers=[address], cluster="west")
        stack.await_agent(agent)
        router, door = stack.start_router({"managers": [address]})
        sidecar, _, status = stack.start_sidecar()
        executor, at = stack.start_colocate()
        for child, listen in ((router, door.removeprefix("http://")), (sidecar, status), (executor, at)):
            children.wait_until(child, functools.partial(is_taken, listen), seconds=120)
        everybody = (manager, agent.child, router, sidecar, executor)
        found: dict[str, set[Listening]] = {its.name: listening_of(its) for its in everybody}
    assert {name: sum(its.kind.startswith("tcp") for its in sockets) for name, sockets in found.items()} == {
        "manager": 2,  # the embedded Redis listens at a Unix socket
        "agent-west-0": 2,
        "router": 1,
        "sidecar": 2,
        "colocate": 1,
    }
    assert [its for sockets in found.values() for its in sockets if its.is_beyond_loopback] == []


OPEN = {
    "manager": ["listen", "http_listen"],
    "agent": ["listen", "status_listen"],
    "router": ["listen", "ext_proc_listen"],
    "sidecar": ["listen", "status_listen"],
    "colocate": ["listen"],
}


BEYOND = ("beyond loopback", "not a private address")


def test_a_port_beyond_loopback_that_lets_everybody_in_stops_the_start_and_its_check(tmp_path: Path) -> None:
    started: dict[str, Child] = {}
    with Children(tmp_path) as children:
        secret = Stack(children, tmp_path).secret_file
        for component, names in OPEN.items():
            for name in names:
                command = _command(component, {**_at_default_hosts(component), name: "0.0.0.0:0"}, secret, tmp_path)
                started[f"{component} {name}"] = children.start(f"{component}-{name}", command)
                check = [*command, "--check-config"]
                started[f"{component} {name} checked"] = children.start(f"{component}-{name}-check", check)
        ended = {name: child.process.wait(120) for name, child in started.items()}
        said = {name: child.tail() for name, child in started.items()}
    assert ended == dict.fromkeys(started, 2), said
    assert [name for name, text in said.items() if not any(words in text for words in BEYOND)] == []


def _command(component: str, addresses: dict[str, str], secret: Path, directory: Path) -> list[str]:
    flags: dict[str, Any] = {**addresses}
    if component not in ("sidecar", "colocate"):
        flags["secret_file"] = secret
    if component == "agent":
        flags |= {"name": "west-0", "socket": directory / "agent.sock", "pool_bytes": "1MiB"}
    if component == "router":
        flags |= {"managers": "127.0.0.1:9"}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    subcommand = ["serve"] if component == "colocate" else []
    return [str(Path(sys.executable).parent / f"prfaas-{component}"), *subcommand, *words]


def test_consent_by_name_lets_it_start(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        secret = Stack(children, tmp_path).secret_file
        for component in OPEN:
            addresses = {name: f"0.0.0.0:{port}" for port, name in enumerate(OPEN[component], 7990)}
            words = _command(component, addresses, secret, tmp_path)
            line = [*words, "--insecure-plaintext", "--check-config"]
            done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
            assert done.returncode == 0, done.stderr
