"""`prfaas` beside a real manager and real agents."""

import asyncio
import os
import pty
import subprocess
from asyncio.subprocess import DEVNULL
from pathlib import Path
from typing import Any

import pytest

from prfaas.console.authority import Authority
from prfaas.types import AgentName
from tests.integration.console.terminal import COMMAND, SECONDS, Ran, run, run_here, run_here_on_terminal
from tests.integration.manager.test_routing import route_request, two_clusters
from tests.support.agent_deployment import AgentDeployment
from tests.support.certificates import tls_config, tls_record
from tests.support.deployment import Deployment, match_request
from tests.support.prefix_engine import chain_of, prefix_of
from tests.support.secret_files import write_deployment_secret
from tests.support.waiting import PATIENCE_SECONDS, until

NUM_BLOCKS = 5 + 2 + 1  # A prefix of 160 tokens: attention, window, state.


def flags_of(site: AgentDeployment) -> list[str]:
    where = [f"--pages=http://{site.manager.http_address}", f"--managers={site.manager.address}", "--routers="]
    return [*where, "--timeout=60"]  # Generous for a busy machine.


async def prfaas(site: AgentDeployment, *arguments: str, terminal: bool = False, secret: Path | None = None) -> Ran:
    flags = [*flags_of(site), *([f"--secret-file={secret}"] if secret else [])]
    return await asyncio.to_thread(run_here_on_terminal if terminal else run_here, *arguments, *flags)


async def _reported(site: AgentDeployment, deployment: Deployment, *names: str) -> None:
    """Nodes whose agents only report; each has an engine of either role that does not say what it runs."""
    for name in names:
        deployment.run(deployment.reporter(name, site.manager, cluster="west"))
    await until(lambda: {item.node.name for item in site.manager.world.live()} >= {*names}, what="the nodes")


async def test_status_shows_every_live_node_to_programs_and_to_people(site: AgentDeployment) -> None:
    await site.node("pd-0", "west")
    await site.node("east-0", "east", **{"cluster-kind": "prfaas"})
    ran = await asyncio.to_thread(run, "status", *flags_of(site))
    assert ran.status == 0, ran.error
    assert [item["node"]["name"] for item in ran.document["state"]["nodes"]] == ["east-0", "pd-0"]
    assert ran.document["threshold_tokens"] == site.manager.routing.threshold_tokens
    seen = await asyncio.to_thread(run_here_on_terminal, "status", *flags_of(site))
    assert seen.status == 0
    assert "Clusters" in seen.output and "west" in seen.output and "prfaas" in seen.output
    assert not seen.output.lstrip().startswith("{")


async def test_status_ready_ends_as_the_manager_s_readyz_answers(deployment: Deployment, tmp_path: Path) -> None:
    """Over the TLS of its pages, which only whoever has a certificate is answered through."""
    issued = Authority(tmp_path).issue("manager", hosts=("127.0.0.1",))
    manager = await deployment.start_manager(http_listen="0.0.0.0:0", tls=tls_config(issued))
    page = f"https://127.0.0.1:{manager.http_address.rpartition(':')[2]}"
    flags = [f"--pages={page}", *(f"--tls-{name}={path}" for name, path in tls_record(issued).items())]
    ready = await asyncio.to_thread(run_here, "status", "--ready", *flags)
    assert (ready.status, ready.document) == (0, {page: "ready"}), ready.error
    manager.is_ready = False
    ran = await asyncio.to_thread(run_here, "status", "--ready", *flags)
    assert (ran.status, ran.document) == (1, {page: "not ready: HTTP status 503"}), ran.error
    assert (await asyncio.to_thread(run_here, "status", *flags)).status == 0, "it answers all else"


def test_status_ready_ends_with_1_where_nobody_answers() -> None:
    assert run_here("status", "--ready", "--pages=http://127.0.0.1:9", "--timeout=2").status == 1


async def test_links_shows_what_agents_report_of_their_links(site: AgentDeployment) -> None:
    source, _ = await site.node("a"), await site.node("b")
    prefix = prefix_of(chain_of(160), 160)
    await asyncio.to_thread(source.leave, prefix)
    assert (await site.copy(prefix, "a", "b")).outcome == "completed"
    await until(lambda: any(item.figures.links for item in site.manager.world.live()), what="a reported link")
    ran = await prfaas(site, "links")
    assert [(item["node"], item["peer"]) for item in ran.document] == [("a", "b")]
    (reported,) = (link for item in site.manager.world.live() for link in item.figures.links)
    (shown,) = ran.document
    assert shown["num_connections"] == reported.num_connections > 0 and shown["rtt_seconds"] > 0
    assert "rtt" in (await prfaas(site, "links", terminal=True)).output


async def test_pool_ls_shows_what_the_index_knows(site: AgentDeployment) -> None:
    hand = await site.node("a")
    await asyncio.to_thread(hand.leave, prefix_of(chain_of(160), 160))
    await until(lambda: site.manager.world.index.num_blocks() == NUM_BLOCKS, what="announced blocks")
    ran = await prfaas(site, "pool", "ls")
    kinds = {item["kind"]: item for item in ran.document}
    assert kinds["full_attention"]["tier"] == "memory"
    assert sum(item["num_blocks"] for item in ran.document) == site.manager.world.index.num_blocks()
    assert all(item["num_bytes"] > 0 for item in ran.document)
    assert "full_attention" in (await prfaas(site, "pool", "ls", terminal=True)).output


async def test_drain_empties_a_node_for_whoever_has_the_secret(site: AgentDeployment, deployment: Deployment) -> None:
    await site.node("leaving")
    flags = [*flags_of(site), f"--secret-file={deployment.secret_file}"]
    ran = await asyncio.to_thread(run, "drain", "leaving", "--within=0s", *flags)
    assert (ran.status, ran.document) == (
        0,
        {"node": "leaving", "num_prefixes": 0, "moved_bytes": 0, "num_requests_left": 0, "num_engines_unknown": 0},
    ), ran.error
    assert "leaving" in site.manager.world.leaving
    unknown = await prfaas(site, "drain", "nobody", secret=deployment.secret_file)
    assert unknown.status == 2 and "unknown or silent" in unknown.error


async def test_undrain_places_on_a_drained_node_again(site: AgentDeployment, deployment: Deployment) -> None:
    await _reported(site, deployment, "back")
    site.manager.world.drain(AgentName("back"))
    ran = await prfaas(site, "undrain", "back", secret=deployment.secret_file)
    assert (ran.status, ran.document) == (0, {"node": "back"}), ran.error
    assert not site.manager.world.leaving


async def test_hot_prefixes_are_shown_with_their_holders(site: AgentDeployment) -> None:
    hand = await site.node("a")
    prefix = prefix_of(chain_of(160), 160)
    await asyncio.to_thread(hand.leave, prefix)
    await until(lambda: site.manager.world.index.num_blocks() == NUM_BLOCKS, what="announced blocks")
    for _ in range(9):  # A busy machine may take longer than the 7 s after which a hit is forgotten.
        await site.client.match(match_request(chain_of(161)))
    hot = (await prfaas(site, "pool", "hot")).document
    assert [(item["hash"], item["num_tokens"], item["holders"]) for item in hot] == [
        (prefix.end_hash.hex(), 160, ["a"])
    ]


async def test_flip_gives_a_node_another_role_and_the_announced_one_back(
    site: AgentDeployment, deployment: Deployment
) -> None:
    await _reported(site, deployment, "turning", "other")

    def roles() -> dict[str, str]:
        return {engine.instance: engine.role for member in site.manager.world.live() for engine in member.node.engines}

    ran = await prfaas(site, "flip", "turning", "prefill", "--within=100ms", secret=deployment.secret_file)
    change = {"instance": "turning-engine", "before": "both", "after": "prefill", "num_requests_left": None}
    assert (ran.status, ran.document) == (0, [change]), "nobody says what it runs"
    assert roles() == {"turning-engine": "prefill", "other-engine": "both"}
    refused = await prfaas(site, "flip", "other", "prefill", "--within=0s", secret=deployment.secret_file)
    assert refused.status == 2 and "no instance of west would decode" in refused.error
    back = await prfaas(
        site, "flip", "turning", "announced", "--within=0s", secret=deployment.secret_file, terminal=True
    )
    assert back.status == 0 and "turning-engine" in back.output and "unknown" in back.output
    assert roles() == {"turning-engine": "both", "other-engine": "both"}


async def test_a_flip_that_is_cut_off_changes_nothing(
    site: AgentDeployment, deployment: Deployment, caplog: pytest.LogCaptureFixture
) -> None:
    await _reported(site, deployment, "turning", "other")
    command = [*COMMAND, "flip", "turning", "prefill", f"--within={10 * PATIENCE_SECONDS:g}s", *flags_of(site)]
    command += [f"--secret-file={deployment.secret_file}"]
    with caplog.at_level("INFO"):
        flipping = await asyncio.create_subprocess_exec(*command, stdout=DEVNULL, stderr=DEVNULL)
        await until(
            lambda: "admin.action_started who=operator action=set_role target=turning" in caplog.text, what="its begin"
        )
        flipping.kill()
        await flipping.wait()
        await until(lambda: "target=turning outcome=cut_off" in caplog.text, what="its end on record")
    roles = {engine.instance: engine.role for member in site.manager.world.live() for engine in member.node.engines}
    assert roles == {"turning-engine": "both", "other-engine": "both"} and not site.manager.world.draining


async def test_drain_of_a_node_that_is_not_known_to_be_empty_ends_with_status_1(
    site: AgentDeployment, deployment: Deployment
) -> None:
    await _reported(site, deployment, "silent")
    alone = await prfaas(site, "drain", "silent", "--within=0s", secret=deployment.secret_file)
    assert alone.status == 2 and "no other node decodes" in alone.error
    await _reported(site, deployment, "staying")
    ran = await prfaas(site, "drain", "silent", "--within=0s", secret=deployment.secret_file)
    assert (ran.status, ran.document["num_engines_unknown"]) == (1, 1), ran.error
    assert "both, drains" in (await prfaas(site, "status", terminal=True)).output


async def test_explain_says_of_whom_it_asked_when_nobody_knows(site: AgentDeployment) -> None:
    ran = await prfaas(site, "explain", "00ff")
    assert ran.status == 2 and "00ff: none of the latest requests" in ran.error


async def test_explain_shows_why_a_manager_decided_as_it_did(deployment: Deployment) -> None:
    manager = await deployment.start_manager(threshold_tokens=500)
    client = await two_clusters(deployment, manager)
    await client.route(route_request(chain_of(1000), request_id=bytes(7) + b"\x09"))
    flags = [f"--pages=http://{manager.http_address}", "--routers=", "--timeout=60"]
    ran = await asyncio.to_thread(run_here, "explain", "0000000000000009", *flags)
    assert ran.status == 0, ran.error
    assert (ran.document["decision"]["route"], ran.document["decision"]["reason"]) == ("remote", "long")
    seen = await asyncio.to_thread(run_here_on_terminal, "explain", "0000000000000009", *flags)
    assert seen.status == 0 and "prefill-engine" in seen.output and not seen.output.lstrip().startswith("{")


def test_a_manager_that_does_not_answer_is_named() -> None:
    ran = run("status", "--pages=http://127.0.0.1:9", "--timeout=2")
    assert (ran.status, ran.output) == (2, "")
    assert "http://127.0.0.1:9/state" in ran.error


def test_config_check_names_the_file_each_key_and_the_accepted_form(tmp_path: Path) -> None:
    good, bad = tmp_path / "router.yaml", tmp_path / "agent-east.yaml"
    good.write_text(f"secret_file: {write_deployment_secret(tmp_path)}\nmanagers: [m:1]\n")
    bad.write_text("name: a\nsecret_file: /s\npool_byte: 4GiB\n")
    ran = run_here("config", "check", str(good), str(bad))
    outcomes: dict[str, Any] = {Path(item["file"]).name: item["outcome"] for item in ran.document}
    assert ran.status == 1
    assert outcomes["router.yaml"] == "good"
    assert "pool_byte: unknown key, did you mean pool_bytes?" in outcomes["agent-east.yaml"]
    bad.write_text("listen: nowhere\npool_byte: 4GiB\negress: [{peers: a, rate: 1}, {}]\nsecret_file: /s\n")
    (several,) = run_here("config", "check", str(bad)).document
    faults = [line.removeprefix(f"{bad} ") for line in several["outcome"].splitlines()]
    assert [tuple(fault.split(": ")[:2]) for fault in faults] == [
        ("line 1", "listen"),
        ("line 2", "pool_byte"),
        ("line 3", "egress[0].rate"),
        ("line 3", "egress[1].peers"),
        ("line 1", "name"),
    ]
    assert run_here_on_terminal("config", "check", str(good)).status == 0


def test_top_outlives_managers_that_do_not_answer_until_q_is_typed() -> None:
    keyboard, terminal = pty.openpty()
    flags = ["--every=10ms", "--pages=http://127.0.0.1:9", "--timeout=2"]
    top = subprocess.Popen([*COMMAND, "top", *flags], stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    shown = b""
    while shown.count(b"Managers") < 2:
        shown += os.read(keyboard, 65536)
    os.write(keyboard, b"q")
    assert top.wait(SECONDS) == 0
    os.close(keyboard)
    assert run_here("top").status == 2, "it needs a terminal"


def test_what_the_machine_refuses_is_said_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused = run_here("certs", "new", str(tmp_path / "file" / "tls"), "west-0")
    assert (refused.status, "Not a directory" in refused.error) == (2, True)
    missing = [f"--tls-{name}={tmp_path / name}" for name in ("authority", "certificate", "key")]
    unread = run_here("status", *missing)
    assert (unread.status, str(tmp_path / "authority") in unread.error) == (2, True)


async def test_page_in_plain_text_is_named(site: AgentDeployment, tmp_path: Path) -> None:
    issued = Authority(tmp_path).issue("operator")
    flags = [f"--tls-{name}={path}" for name, path in tls_record(issued).items()]
    plain = await asyncio.to_thread(run_here, "status", f"--pages=https://{site.manager.http_address}", *flags)
    assert (plain.status, "answers in plain text" in plain.error) == (2, True), plain.error
