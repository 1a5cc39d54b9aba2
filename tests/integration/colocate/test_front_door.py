"""The real router before executors: live traffic, prefixes that the index knows of, KV from another cluster, deaths."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.colocate.site import MODEL, THRESHOLD_TOKENS, Site, post, running_site, sequential
from tests.support.waiting import wait_until
from tools.demo.client import Answer, complete, get_json, transfers

pytestmark = pytest.mark.timeout(240)
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    torch.set_num_threads(1)
    with running_site(tmp_path_factory.mktemp("colocate")) as running:
        yield running


def prompt_of(num_tokens: int, *, seed: int) -> list[int]:
    return [(seed * 31 + 7 * i + i * i) % 320 for i in range(num_tokens)]


def ask(site: Site, prompt: list[int], num_tokens: int = NUM_TOKENS, **more: Any) -> Answer:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0}
    return complete(site.router_url, body | more)


def test_answers_to_many_at_once_through_the_router_are_the_sequential_ones(site: Site) -> None:
    prompts = [prompt_of(20 + 9 * i, seed=i) for i in range(12)]
    with ThreadPoolExecutor(len(prompts)) as clients:
        answers = list(clients.map(lambda prompt: ask(site, prompt), prompts))
    assert [list(answer.token_ids) for answer in answers] == [sequential(prompt, NUM_TOKENS) for prompt in prompts]
    assert {answer.headers["x-prfaas-route"] for answer in answers} == {"local"}


def test_the_next_turn_resumes_where_the_answer_ended_and_the_index_knows_what_is_kept(site: Site) -> None:
    prompt = prompt_of(100, seed=50)
    answer = list(ask(site, prompt).token_ids)
    question = [*prompt, *answer, 1, 2, 3]
    wanted = sequential(question, 4)

    def resumes() -> bool:
        """Return all but the last token of the answer, which no step has read; the copy is made after the answer has ended."""
        body = {"model": MODEL, "prompt": question, "max_tokens": 4}
        raw = post(f"{site.router_url}/v1/completions", body)
        assert raw["choices"][0]["token_ids"] == wanted
        cached: int = raw["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached == len(prompt) + len(answer) - 1

    wait_until(resumes, seconds=90, what="the answer's blocks in the pool")
    wait_until(site.index_is_true, seconds=90, what="the index to know what the nodes hold")


def test_a_long_prompt_is_prefilled_in_the_other_cluster_and_answered_the_same(site: Site) -> None:
    prompt = prompt_of(2 * THRESHOLD_TOKENS, seed=60)
    answer = ask(site, prompt)
    assert answer.headers["x-prfaas-route"] == "remote"
    assert list(answer.token_ids) == sequential(prompt, NUM_TOKENS)

    def record() -> dict[str, Any]:
        return transfers(site.agents["west"].status_url)[answer.headers["x-prfaas-transfer"]]

    wait_until(lambda: record()["outcome"] == "completed", what="the transfer's end in the agent's record")
    assert record()["payload_bytes"] > 0


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_the_death_of_a_side_under_the_router_changes_no_token(site: Site, side: str) -> None:
    prompts = [prompt_of(40 + 11 * i, seed=70 + i) for i in range(6)]
    pid = pids_of(site, "west")[side]
    with ThreadPoolExecutor(len(prompts)) as clients:
        answers = running_answers(site, clients, prompts)
        os.kill(pid, signal.SIGKILL)
        tokens = [list(answer.result().token_ids) for answer in answers]
    assert tokens == [sequential(prompt, 200) for prompt in prompts]
    wait_until(lambda: site.status("west")["restarts"][side] == 1, what="the restart")
    pids_of(site, "west")


def running_answers(site: Site, clients: ThreadPoolExecutor, prompts: list[list[int]]) -> list[Future[Answer]]:
    """Answers of 200 tokens of which some were still being decoded a moment ago."""
    while True:
        answers = [clients.submit(ask, site, prompt, 200) for prompt in prompts]

        def are_over(answers: list[Future[Answer]] = answers) -> bool:
            return all(answer.done() for answer in answers)

        wait_until(lambda: site.status("west")["running"] >= 1 or are_over(), what="a request that runs")
        if not are_over():
            return answers


def pids_of(site: Site, name: str) -> dict[str, int]:
    """Return the process ids of both sides. A restarted side changes its id after the restart is counted."""
    wait_until(lambda: len(site.status(name)["pids"]) == 2, what="both sides")
    found: dict[str, int] = site.status(name)["pids"]
    return found


def test_the_manager_knows_its_load_under_the_name_of_its_instance(site: Site) -> None:
    def loads() -> set[str]:
        nodes = get_json(f"{site.manager_url}/state").get("nodes", ())
        return {load["instance"] for node in nodes for load in node.get("engines", ())}

    wait_until(lambda: loads() == {"east/0", "west/0"}, what="both loads")


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(("name", "number"), [("east", signal.SIGTERM), ("west", signal.SIGKILL)])
def test_both_sides_go_with_the_server_however_it_ends(site: Site, name: str, number: signal.Signals) -> None:
    """The last tests of the site: its executors are gone after them."""
    pids = list(pids_of(site, name).values())
    assert all(map(is_running, pids))
    process = site.engines[name].process
    os.kill(process.pid, number)
    assert process.wait(timeout=90) == (0 if number == signal.SIGTERM else -number)
    wait_until(lambda: not any(map(is_running, pids)), seconds=90, what="the end of both sides")
