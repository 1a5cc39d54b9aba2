"""Requests of the demo, and checks of their results."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from tools.demo.client import Answer, complete, get_json, prefilled_tokens, prompt_tokens, transfers
from tools.demo.corruption import flip_byte_in_first_chunk
from tools.demo.table import Row
from tools.link import Relay

CHUNK_TOKENS = 256  # Engines prefill in chunks of this size.
SHORT_TOKENS = 48
# All tokens but the last are whole chunks, because the reference splits the prompt there too.
LONG_TOKENS = 12 * CHUNK_TOKENS + 1
SHARED_TOKENS = 8 * CHUNK_TOKENS  # Shared by the long prompt and the new question.
ELSEWHERE_TOKENS = 8 * CHUNK_TOKENS  # Length of a prompt that only east has seen.
TURN_TOKENS = 100  # Below the threshold.
LONG_TURN_TOKENS = 3 * CHUNK_TOKENS  # Above the threshold.
BLOCK_TOKENS = 256  # Largest block: so many tokens of a cached prefix may be computed again.
NUM_OUTPUT_TOKENS = 24
CUT_LINK = "long, link cut half-way"
FRAMING_RATIO = 0.005
SETTLE_SECONDS = 20.0
REST_SECONDS = 0.6  # The counters of an engine lag behind its answers by a step.
FIGURES_SECONDS = 1.5  # Agents report link statistics every second.


@dataclass(frozen=True)
class Case:
    """Request with its expected result. `outcomes` are the accepted outcomes of its transfer."""

    name: str
    prompt: list[int]
    route: str
    outcomes: tuple[str, ...] = ("-",)
    max_prefilled_tokens: int | None = None  # Set if the rest of the prompt is cached.
    is_partly_held: bool = False  # The receiver holds some blocks, which must not travel.
    is_alone: bool = True
    previous: list[int] | None = None  # The reference engine computes this prompt first.


@dataclass(frozen=True)
class Result:
    """Answer to a case."""

    case: Case
    answer: Answer
    num_prefilled_tokens: int | None


@dataclass(frozen=True)
class Scene:
    """Running deployment of the demo."""

    model: str
    router_url: str
    engine_urls: dict[str, str]  # By cluster: east and west.
    agent_urls: dict[str, str]  # Status pages by cluster.
    link: Relay
    vocabulary: range
    say: Callable[[str], None]


def run(scene: Scene, *, corrupt: bool) -> list[Row]:
    """Send all requests in order, then compare each answer with the reference."""
    results = [_send(scene, Case("short", _prompt(scene, SHORT_TOKENS, seed=1), "local"))]
    long = _send(scene, _long(scene, "long", seed=2))
    results += [long, *_parallel(scene), _new_question(scene, long), _second_turn(scene, long), _cached_in_east(scene)]
    results.append(_over_cut_link(scene, num_bytes=transfer_of(scene, "east", long.answer)["payload_bytes"] // 2))
    if corrupt:
        results.append(_over_corrupting_link(scene))
    scene.say("reference: every prompt on west's engine alone")
    return [_row(scene, result) for result in results]


def _long(scene: Scene, name: str, *, seed: int) -> Case:
    return Case(name, _prompt(scene, LONG_TOKENS, seed=seed), "remote", ("completed",))


def _parallel(scene: Scene) -> list[Result]:
    cases = [replace(_long(scene, f"long, {n} of 3 at once", seed=2 + n), is_alone=False) for n in (1, 2, 3)]
    with ThreadPoolExecutor(len(cases)) as pool:
        return list(pool.map(lambda case: _send(scene, case), cases))


def _new_question(scene: Scene, long: Result) -> Result:
    """Send the long prompt with another end: only missing blocks and one state travel."""
    _settle(scene)
    end = _prompt(scene, LONG_TOKENS - SHARED_TOKENS, seed=8)
    prompt = long.case.prompt[:SHARED_TOKENS] + end
    return _send(scene, Case("long, new question", prompt, "remote", ("completed",), is_partly_held=True))


def _second_turn(scene: Scene, long: Result) -> Result:
    """Send prompt, answer and a new turn: west holds all but the new turn."""
    _settle(scene)
    prompt = long.case.prompt + list(long.answer.token_ids) + _prompt(scene, TURN_TOKENS, seed=9)
    limit = TURN_TOKENS + BLOCK_TOKENS
    return _send(scene, Case("second turn", prompt, "local", max_prefilled_tokens=limit, previous=long.case.prompt))


def _cached_in_east(scene: Scene) -> Result:
    """Send a prompt with a prefix that only east holds."""
    first = _prompt(scene, ELSEWHERE_TOKENS, seed=10)
    scene.say(f"{ELSEWHERE_TOKENS} tokens to east's engine alone")
    seen = complete(scene.engine_urls["east"], _body(scene, first))
    _settle(scene)
    prompt = first + list(seen.token_ids) + _prompt(scene, LONG_TURN_TOKENS, seed=11)
    limit = LONG_TURN_TOKENS + BLOCK_TOKENS
    case = Case("prefix only in east", prompt, "remote", ("completed",), max_prefilled_tokens=limit, previous=first)
    return _send(scene, case)


def _over_cut_link(scene: Scene, *, num_bytes: int) -> Result:
    # West's engine may give the transfer up ("cancelled") before the agents notice that the link is silent.
    outcomes = ("cancelled", "unreachable", "deadline")
    case = replace(_long(scene, CUT_LINK, seed=6), outcomes=outcomes)
    scene.link.cut_after(num_bytes)
    try:
        result = _send(scene, case)
        if not scene.link.is_cut:
            raise RuntimeError("the link was not cut: fewer bytes than expected crossed it")
        return result
    finally:
        scene.link.restore()


def _over_corrupting_link(scene: Scene) -> Result:
    scene.link.filter(flip_byte_in_first_chunk)
    try:
        _await_link(scene)
        return _send(scene, replace(_long(scene, "long, one byte flipped", seed=7), outcomes=("checksum",)))
    finally:
        scene.link.filter(None)


def _await_link(scene: Scene) -> None:
    """Wait until east is connected to west again and has reported the link to the manager."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while not all(link["num_connections"] for link in get_json(f"{scene.agent_urls['east']}/status")["links"]):
        if time.monotonic() > deadline:
            raise RuntimeError("the link from east to west is not restored")
        threading.Event().wait(0.05)
    threading.Event().wait(FIGURES_SECONDS)


def _prompt(scene: Scene, length: int, *, seed: int) -> list[int]:
    return prompt_tokens(length, seed=seed, vocabulary=scene.vocabulary)


def _body(scene: Scene, prompt: list[int]) -> dict[str, Any]:
    return {
        "model": scene.model,
        "prompt": prompt,
        "max_tokens": NUM_OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }


def _send(scene: Scene, case: Case) -> Result:
    scene.say(f"{case.name}: {len(case.prompt)} tokens through the router")
    before = _prefilled(scene) if case.is_alone else 0
    answer = complete(scene.router_url, _body(scene, case.prompt))
    return Result(case, answer, _prefilled(scene) - before if case.is_alone else None)


def _prefilled(scene: Scene) -> int:
    """Return the prompt tokens that both engines have computed, once the counters are stable."""
    last, since = -1, time.monotonic()
    while time.monotonic() - since < REST_SECONDS:
        now = sum(prefilled_tokens(url) for url in scene.engine_urls.values())
        if now != last:
            last, since = now, time.monotonic()
        threading.Event().wait(0.05)
    return last


def _settle(scene: Scene) -> None:
    """Wait until both pools have stored their blocks and the manager has the reports."""
    for name, url in scene.agent_urls.items():
        deadline = time.monotonic() + SETTLE_SECONDS
        while not _is_settled(get_json(f"{url}/status")):
            if time.monotonic() > deadline:
                raise RuntimeError(f"agent {name} does not become idle: {get_json(f'{url}/status')}")
            threading.Event().wait(0.05)


def _is_settled(status: dict[str, Any]) -> bool:
    reporting = status["reporting"]
    is_idle = status["sending"] == status["receiving"] == status["prefix_store"] == status["pool"]["transfer"] == 0
    return bool(is_idle and reporting["manager"] and reporting["acknowledged"] == reporting["sequence"])


def transfer_of(scene: Scene, agent: str, answer: Answer) -> dict[str, Any]:
    """Return an agent's record of an answer's transfer once the transfer has ended."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < deadline:
        record = transfers(scene.agent_urls[agent]).get(answer.headers.get("x-prfaas-transfer", ""))
        if record is not None and record["outcome"] != "running":
            return record
        threading.Event().wait(0.05)
    raise RuntimeError(f"agent {agent} reports no end of transfer {answer.headers.get('x-prfaas-transfer')}")


def _row(scene: Scene, result: Result) -> Row:
    case, answer = result.case, result.answer
    expected = _reference(scene, case)
    is_remote = "x-prfaas-transfer" in answer.headers
    sent = transfer_of(scene, "east", answer) if is_remote else None
    received = transfer_of(scene, "west", answer) if is_remote else None
    ended = received["outcome"] if received else "-"
    row = Row(
        name=case.name,
        route=answer.headers["x-prfaas-route"],
        reason=answer.headers["x-prfaas-reason"],
        num_prompt_tokens=len(case.prompt),
        num_prefilled_tokens=result.num_prefilled_tokens,
        wire_bytes=received["wire_bytes"] if received else 0,
        early_ratio=early_ratio(sent),
        ttft_seconds=answer.ttft_seconds,
        ended="transferred" if ended == "completed" else ended if ended == "-" else f"recomputed: {ended}",
        tokens_equal=answer.token_ids == expected and len(expected) == NUM_OUTPUT_TOKENS,
    )
    return replace(row, fault="; ".join(_faults(case, row, sent=sent, received=received)) or None)


def _reference(scene: Scene, case: Case) -> tuple[int, ...]:
    """Return the answer of west's engine alone. A salt keeps it from reusing earlier blocks."""
    salt = {"cache_salt": case.name}
    if case.previous:
        complete(scene.engine_urls["west"], _body(scene, case.previous) | salt)
        _settle(scene)
    return complete(scene.engine_urls["west"], _body(scene, case.prompt) | salt).token_ids


def early_ratio(sent: dict[str, Any] | None) -> float | None:
    if not sent or sent["outcome"] != "completed":
        return None
    return float(sent["acknowledged_before_prefill_ended_bytes"] / max(1, sent["acknowledged_bytes"]))


def _faults(case: Case, row: Row, *, sent: dict[str, Any] | None, received: dict[str, Any] | None) -> Sequence[str]:
    faults = []
    if not row.tokens_equal:
        faults.append("tokens differ from the reference")
    if row.route != case.route:
        faults.append(f"route {row.route} instead of {case.route}")
    ended = received["outcome"] if received else "-"
    if ended not in case.outcomes:
        faults.append(f"transfer ended as {ended!r} instead of {' or '.join(case.outcomes)}")
    limit, computed = case.max_prefilled_tokens, row.num_prefilled_tokens
    if limit is not None and computed is not None and computed > limit:
        faults.append(f"{computed} tokens were prefilled instead of at most {limit}")
    if received and ended == "checksum" and not received["checksum_failures"]:
        faults.append("no checksum failure was counted")
    if received and ended == "completed":
        faults += _byte_faults(case, received)
    if sent and ended == "completed" and case.is_alone and not case.max_prefilled_tokens and not case.is_partly_held:
        early, half = sent["acknowledged_before_prefill_ended_bytes"], sent["attention_bytes"] / 2
        if early < half:
            faults.append(f"only {early} of {sent['attention_bytes']} attention bytes arrived before prefill ended")
    return faults


def _byte_faults(case: Case, received: dict[str, Any]) -> Sequence[str]:
    missing = received["payload_bytes"] - received["held_bytes"]
    faults = []
    if not missing <= received["wire_bytes"] <= missing * (1 + FRAMING_RATIO):
        faults.append(f"{received['wire_bytes']} bytes on the wire for {missing} missing bytes")
    if case.is_partly_held and not received["held_bytes"]:
        faults.append("the receiver holds no blocks")
    return faults
