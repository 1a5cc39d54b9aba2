"""The demo's requests, and what must be true of each."""

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

CHUNK_TOKENS = 256  # the engines prefill in chunks of this
SHORT_TOKENS = 48
LONG_TOKENS = (
    12 * CHUNK_TOKENS + 1
)  # all but the last token are whole chunks: the reference splits the prompt there too
SHARED_TOKENS = 8 * CHUNK_TOKENS  # what the third request has in common with the second
ELSEWHERE_TOKENS = 8 * CHUNK_TOKENS  # a prompt that only east has seen
TURN_TOKENS = 100  # a new turn, below the threshold
LONG_TURN_TOKENS = 3 * CHUNK_TOKENS  # one above it
BLOCK_TOKENS = 256  # no engine here has larger blocks: so much of a cached prefix may be computed again
NUM_OUTPUT_TOKENS = 24
FRAMING_RATIO = 0.005
SETTLE_SECONDS = 20.0
REST_SECONDS = 0.6  # an engine's counters follow its answers by a step
FIGURES_SECONDS = 1.5  # agents report their links' figures each second


@dataclass(frozen=True)
class Case:
    """One request and what must come of it. `ended`: the outcomes of its transfer that are right."""

    name: str
    prompt: list[int]
    route: str
    ended: tuple[str, ...] = ("-",)
    max_prefilled_tokens: int | None = None  # the rest of the prompt is cached where it is prefilled
    some_is_held: bool = False  # the receiver has a part already, which must not travel
    alone: bool = True
    earlier: list[int] | None = None  # the conversation's turn before, which the reference engine is asked first


@dataclass(frozen=True)
class Result:
    """What came back for a case."""

    case: Case
    answer: Answer
    num_prefilled_tokens: int | None


@dataclass(frozen=True)
class Scene:
    """Where to send, and what to look at afterwards."""

    model: str
    router_url: str
    engine_urls: dict[str, str]  # of east and west
    agent_urls: dict[str, str]  # their status pages
    link: Relay
    vocabulary: range
    say: Callable[[str], None]


def run(scene: Scene, *, corrupt: bool) -> list[Row]:
    """Send everything in order, then compare each answer with the reference."""
    results = [_send(scene, Case("short", _prompt(scene, SHORT_TOKENS, seed=1), "local"))]
    long = _send(scene, _long(scene, "long", seed=2))
    results += [long, *_several(scene), _new_question(scene, long), _second_turn(scene, long), _known_elsewhere(scene)]
    results.append(_over_cut_link(scene, num_bytes=_transfer(scene, "east", long.answer)["payload_bytes"] // 2))
    if corrupt:
        results.append(_over_corrupting_link(scene))
    scene.say("reference: every prompt on west's engine alone")
    return [_row(scene, result) for result in results]


def _long(scene: Scene, name: str, *, seed: int) -> Case:
    return Case(name, _prompt(scene, LONG_TOKENS, seed=seed), "remote", ("completed",))


def _several(scene: Scene) -> list[Result]:
    cases = [replace(_long(scene, f"long, {n} of 3 at once", seed=2 + n), alone=False) for n in (1, 2, 3)]
    with ThreadPoolExecutor(len(cases)) as pool:
        return list(pool.map(lambda case: _send(scene, case), cases))


def _new_question(scene: Scene, long: Result) -> Result:
    """The long prompt again with another end: only the blocks that west lacks travel, and one state."""
    _settle(scene)
    end = _prompt(scene, LONG_TOKENS - SHARED_TOKENS, seed=8)
    prompt = long.case.prompt[:SHARED_TOKENS] + end
    return _send(scene, Case("long, new question", prompt, "remote", ("completed",), some_is_held=True))


def _second_turn(scene: Scene, long: Result) -> Result:
    """Prompt, answer and a new turn: west holds all but the turn."""
    _settle(scene)
    prompt = long.case.prompt + list(long.answer.token_ids) + _prompt(scene, TURN_TOKENS, seed=9)
    limit = TURN_TOKENS + BLOCK_TOKENS
    return _send(scene, Case("second turn", prompt, "local", max_prefilled_tokens=limit, earlier=long.case.prompt))


def _known_elsewhere(scene: Scene) -> Result:
    """A prompt of which east alone holds the beginning."""
    first = _prompt(scene, ELSEWHERE_TOKENS, seed=10)
    scene.say(f"{ELSEWHERE_TOKENS} tokens to east's engine alone")
    seen = complete(scene.engine_urls["east"], _body(scene, first))
    _settle(scene)
    prompt = first + list(seen.token_ids) + _prompt(scene, LONG_TURN_TOKENS, seed=11)
    limit = LONG_TURN_TOKENS + BLOCK_TOKENS
    case = Case("prefix only in east", prompt, "remote", ("completed",), max_prefilled_tokens=limit, earlier=first)
    return _send(scene, case)


def _over_cut_link(scene: Scene, *, num_bytes: int) -> Result:
    case = replace(_long(scene, "long, link cut half-way", seed=6), ended=("unreachable", "deadline"))
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
        return _send(scene, replace(_long(scene, "long, one byte flipped", seed=7), ended=("checksum",)))
    finally:
        scene.link.filter(None)


def _await_link(scene: Scene) -> None:
    """Wait until east is connected to west again and has said so to the manager, which it does once a second."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while not all(link["num_connections"] for link in get_json(f"{scene.agent_urls['east']}/status")["links"]):
        if time.monotonic() > deadline:
            raise RuntimeError("the link from east to west does not come back")
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
    before = _prefilled(scene) if case.alone else 0
    answer = complete(scene.router_url, _body(scene, case.prompt))
    return Result(case, answer, _prefilled(scene) - before if case.alone else None)


def _prefilled(scene: Scene) -> int:
    """Prompt tokens that both engines have computed, once their counters have come to rest."""
    last, since = -1, time.monotonic()
    while time.monotonic() - since < REST_SECONDS:
        now = sum(prefilled_tokens(url) for url in scene.engine_urls.values())
        if now != last:
            last, since = now, time.monotonic()
        threading.Event().wait(0.05)
    return last


def _settle(scene: Scene) -> None:
    """Wait until both pools have kept what they were left, and the manager knows of it."""
    for name, url in scene.agent_urls.items():
        deadline = time.monotonic() + SETTLE_SECONDS
        while not _is_settled(get_json(f"{url}/status")):
            if time.monotonic() > deadline:
                raise RuntimeError(f"agent {name} does not come to rest: {get_json(f'{url}/status')}")
            threading.Event().wait(0.05)


def _is_settled(status: dict[str, Any]) -> bool:
    reporting = status["reporting"]
    at_rest = status["sending"] == status["receiving"] == status["keeping"] == status["pool"]["transfer"] == 0
    return bool(at_rest and reporting["manager"] and reporting["acknowledged"] == reporting["sequence"])


def _transfer(scene: Scene, agent: str, answer: Answer) -> dict[str, Any]:
    """What an agent says of an answer's transfer once it has ended."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < deadline:
        record = transfers(scene.agent_urls[agent]).get(answer.headers.get("x-prfaas-transfer", ""))
        if record is not None and record["outcome"] != "running":
            return record
        threading.Event().wait(0.05)
    raise RuntimeError(f"agent {agent} knows no end of transfer {answer.headers.get('x-prfaas-transfer')}")


def _row(scene: Scene, result: Result) -> Row:
    case, answer = result.case, result.answer
    wanted = _reference(scene, case)
    remote = "x-prfaas-transfer" in answer.headers
    sent = _transfer(scene, "east", answer) if remote else None
    received = _transfer(scene, "west", answer) if remote else None
    ended = received["outcome"] if received else "-"
    row = Row(
        name=case.name,
        route=answer.headers["x-prfaas-route"],
        reason=answer.headers["x-prfaas-reason"],
        num_prompt_tokens=len(case.prompt),
        num_prefilled_tokens=result.num_prefilled_tokens,
        wire_bytes=received["wire_bytes"] if received else 0,
        early_ratio=_early_ratio(sent),
        ttft_seconds=answer.ttft_seconds,
        ended="transferred" if ended == "completed" else ended if ended == "-" else f"recomputed: {ended}",
        tokens_equal=answer.token_ids == wanted and len(wanted) == NUM_OUTPUT_TOKENS,
    )
    return replace(row, fault="; ".join(_faults(case, row, sent=sent, received=received)) or None)


def _reference(scene: Scene, case: Case) -> tuple[int, ...]:
    """The answer of west's engine alone. Its prompts are salted, so that they share no block with what was sent before."""
    salt = {"cache_salt": case.name}
    if case.earlier:
        complete(scene.engine_urls["west"], _body(scene, case.earlier) | salt)
        _settle(scene)
    return complete(scene.engine_urls["west"], _body(scene, case.prompt) | salt).token_ids


def _early_ratio(sent: dict[str, Any] | None) -> float | None:
    if not sent or sent["outcome"] != "completed":
        return None
    return float(sent["acknowledged_before_prefill_ended_bytes"] / max(1, sent["acknowledged_bytes"]))


def _faults(case: Case, row: Row, *, sent: dict[str, Any] | None, received: dict[str, Any] | None) -> Sequence[str]:
    faults = []
    if not row.tokens_equal:
        faults.append("tokens differ from the reference")
    if row.route != case.route:
        faults.append(f"went {row.route}, not {case.route}")
    ended = received["outcome"] if received else "-"
    if ended not in case.ended:
        faults.append(f"its transfer ended as {ended!r}, not {' or '.join(case.ended)}")
    limit, computed = case.max_prefilled_tokens, row.num_prefilled_tokens
    if limit is not None and computed is not None and computed > limit:
        faults.append(f"{computed} tokens were prefilled; all but {limit} are cached")
    if received and ended == "checksum" and not received["checksum_failures"]:
        faults.append("no checksum failure was counted")
    if received and ended == "completed":
        faults += _byte_faults(case, received)
    if sent and ended == "completed" and case.alone and not case.max_prefilled_tokens and not case.some_is_held:
        early, half = sent["acknowledged_before_prefill_ended_bytes"], sent["attention_bytes"] / 2
        if early < half:
            faults.append(f"only {early} of {sent['attention_bytes']} attention bytes arrived before prefill ended")
    return faults


def _byte_faults(case: Case, received: dict[str, Any]) -> Sequence[str]:
    missing = received["payload_bytes"] - received["held_bytes"]
    faults = []
    if not missing <= received["wire_bytes"] <= missing * (1 + FRAMING_RATIO):
        faults.append(f"{received['wire_bytes']} bytes on the wire for {missing} missing ones")
    if case.some_is_held and not received["held_bytes"]:
        faults.append("nothing was found to be held by the receiver")
    return faults
