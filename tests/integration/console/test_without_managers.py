"""`prfaas` beside a router and agents that have no manager: components answer for themselves."""

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from prfaas.console.components import ask_components
from prfaas.console.config import ConsoleConfig
from prfaas.errors import PageUnreachable
from tests.integration.console.terminal import run_here, run_here_on_terminal
from tests.support.waiting import wait_until
from tools.free_ports import free_address
from tools.processes import Children
from tools.stack import Stack


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a folder of settings whose router and agent run."""
    directory = tmp_path_factory.mktemp("m")
    with Children(directory) as children:
        stack = Stack(children, directory)
        agent = stack.start_agent("west-0")
        instance = {
            "name": "w",
            "url": f"http://{free_address()}",
            "role": "both",
            "agent": "west-0",
            "wire": agent.wire,
        }
        cluster = {"name": "west", "kind": "pd", "instances": [instance]}
        key = directory / "operator-key"
        key.touch(mode=0o600)
        key.write_text(32 * "o")
        settings = {"clusters": [cluster], "threshold_tokens": "1K", "operator_keys_file": str(key)}
        stack.start_router(settings)
        stack.await_agent(agent)
        (directory / "agent-west-0.yaml").rename(directory / "agent.yaml")
        flags = ("status", "--config", str(directory))
        wait_until(lambda: run_here(*flags).status == 0, what="the router")
        yield directory


def test_status_shows_the_router_s_instances_and_the_agents(folder: Path) -> None:
    ran = run_here("status", "--config", str(folder))
    assert ran.status == 0, ran.error
    assert [page["instances"] for page in ran.document["routers"].values()] == [{"w": False}]
    assert [page["name"] for page in ran.document["agents"].values()] == ["west-0"]
    seen = run_here_on_terminal("status", "--config", str(folder)).output
    assert "does not answer" in seen and "west-0" in seen


@pytest.mark.parametrize(("command", "word"), [(("links",), "goodput"), (("pool", "ls"), "west-0")])
def test_links_and_pools_are_those_of_the_agents(command: tuple[str, ...], word: str, folder: Path) -> None:
    ran = run_here_on_terminal(*command, "--config", str(folder))
    assert ran.status == 0 and word in ran.output, ran.output


@pytest.mark.parametrize(
    "command", [("pool", "hot"), ("drain", "west-0"), ("undrain", "west-0"), ("flip", "west-0", "both")]
)
def test_commands_that_need_a_manager_name_it(command: tuple[str, ...], folder: Path) -> None:
    ran = run_here(*command, "--config", str(folder), "--pages=http://127.0.0.1:9")
    assert ran.status == 2 and "manager" in ran.error, ran.error


def test_agents_do_not_get_the_operator_s_key(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.touch(mode=0o600)
    key.write_text(32 * "o")
    headers: dict[str, str | None] = {}

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            headers[self.path] = self.headers["Authorization"]
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        settings = ConsoleConfig(routers=(url,), agents=(f"{url}/agent",), router_key_file=key)
        ask_components(settings, PageUnreachable("no manager"))
        server.shutdown()
    assert headers == {"/health": f"Bearer {32 * 'o'}", "/agent/status": None}
