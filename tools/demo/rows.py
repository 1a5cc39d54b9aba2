"""The demo's requests, and what must be true of each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tools.demo.client import Answer, complete, prompt_tokens, transfers
from tools.demo.corruption import one_byte_of_one_chunk
from tools.demo.table import Row
from tools.link import Relay

CHUNK_TOKENS = 256  # the engines prefill in chunks of this
SHORT_TOKENS = 48
LONG_TOKENS = (
    12 * CHUNK_TOKENS + 1
)  # all but the last token are whole chunks: the reference splits the prompt there too
NUM_OUTPUT_TOKENS = 24
SETTLE_SECONDS = 20.0


@dataclass(frozen=True)
class Case:
    """One request and what must come of it. `ended`: the outcomes of its transfer that are right."""

    name: str
    prompt: list[int]
    route: str
    ended: tuple[str, ...]


@dataclass(frozen=True)
class Scene:
    """Where to send, and what to look at afterwards."""

    model: str
    router_url: str
    engine_url: str  # west's engine itself, for the reference
    east_url: str  # the agents' status pages
    west_url: str
    link: Relay
    vocabulary: range
    say: Callable[[str], None]


def run(scene: Scene, *, corrupt: bool) -> list[Row]:
    """Send everything, compare everything."""
    short = Case("short", _prompt(scene, SHORT_TOKENS, seed=1), "local", ("-",))
    long = Case("long", _prompt(scene, LONG_TOKENS, seed=2), "remote", ("completed",))
    several = [
        Case(f"long, {number} of 3 at once", _prompt(scene, LONG_TOKENS, seed=2 + number), "remote", ("completed",))
        for number in (1, 2, 3)
    ]
    cut = Case("long, link cut half-way", _prompt(scene, LONG_TOKENS, seed=6), "remote", ("unreachable", "deadline"))
    damaged = Case("long, one byte flipped", _prompt(scene, LONG_TOKENS, seed=7), "remote", ("checksum",))
    cases = [short, long, *several, cut, *([damaged] if corrupt else [])]
    scene.say("reference: every prompt on west's engine alone")
    wanted = [_ask(scene, scene.engine_url, case, salt="reference").token_ids for case in cases]
    answers = [_send(scene, case) for case in (short, long)]
    scene.say("three long prompts at once")
    with ThreadPoolExecutor(len(several)) as pool:
        answers += pool.map(lambda case: _send(scene, case), several)
    answers.append(_send_over_cut_link(scene, cut, num_bytes=_payload_bytes(scene, answers[1]) // 2))
    if corrupt:
        answers.append(_send_over_corrupting_link(scene, damaged))
    return [_row(scene, case, answer, tokens) for case, answer, tokens in zip(cases, answers, wanted, strict=True)]


def _prompt(scene: Scene, length: int, *, seed: int) -> list[int]:
    return prompt_tokens(length, seed=seed, vocabulary=scene.vocabulary)


def _ask(scene: Scene, url: str, case: Case, *, salt: str | None = None) -> Answer:
    body: dict[str, Any] = {"model": scene.model, "prompt": case.prompt, "max_tokens": NUM_OUTPUT_TOKENS}
    body |= {"temperature": 0, "ignore_eos": True}
    if salt:
        body["cache_salt"] = salt  # shares no block with the requests that follow
    return complete(url, body)


def _send(scene: Scene, case: Case) -> Answer:
    scene.say(f"{case.name}: {len(case.prompt)} tokens through the router")
    return _ask(scene, scene.router_url, case)


def _send_over_cut_link(scene: Scene, case: Case, *, num_bytes: int) -> Answer:
    scene.link.cut_after(num_bytes)
    try:
        answer = _send(scene, case)
        if not scene.link.is_cut:
            raise RuntimeError("the link was not cut: fewer bytes than expected crossed it")
        return answer
    finally:
        scene.link.mend()


def _send_over_corrupting_link(scene: Scene, case: Case) -> Answer:
    scene.link.filter(one_byte_of_one_chunk)
    try:
        return _send(scene, case)
    finally:
        scene.link.filter(None)


def _payload_bytes(scene: Scene, answer: Answer) -> int:
    return int(_transfer(scene.east_url, answer)["payload_bytes"])


def _transfer(agent_url: str, answer: Answer) -> dict[str, Any]:
    """What an agent says of an answer's transfer once it has ended."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < deadline:
        record = transfers(agent_url).get(answer.headers.get("x-prfaas-transfer", ""))
        if record is not None and record["outcome"] != "running":
            return record
        threading.Event().wait(0.05)
    raise RuntimeError(f"{agent_url} knows no end of transfer {answer.headers.get('x-prfaas-transfer')}")


def _row(scene: Scene, case: Case, answer: Answer, wanted: Sequence[int]) -> Row:
    remote = "x-prfaas-transfer" in answer.headers
    sent = _transfer(scene.east_url, answer) if remote else None
    received = _transfer(scene.west_url, answer) if remote else None
    ended = received["outcome"] if received else "-"
    early = None
    if sent and sent["outcome"] == "completed":
        early = sent["acknowledged_before_prefill_ended_bytes"] / max(1, sent["acknowledged_bytes"])
    row = Row(
        name=case.name,
        route=answer.headers["x-prfaas-route"],
        reason=answer.headers["x-prfaas-reason"],
        num_prompt_tokens=len(case.prompt),
        wire_bytes=received["wire_bytes"] if received else 0,
        early_ratio=early,
        ttft_seconds=answer.ttft_seconds,
        ended="transferred" if ended == "completed" else ended if ended == "-" else f"recomputed: {ended}",
        tokens_equal=answer.token_ids == tuple(wanted) and len(wanted) == NUM_OUTPUT_TOKENS,
    )
    return _judge(case, row, sent, ended)


def _judge(case: Case, row: Row, sent: dict[str, Any] | None, ended: str) -> Row:
    faults = []
    if not row.tokens_equal:
        faults.append("tokens differ from the reference")
    if row.route != case.route:
        faults.append(f"went {row.route}, not {case.route}")
    if ended not in case.ended:
        faults.append(f"its transfer ended as {ended!r}, not {' or '.join(case.ended)}")
    if sent and sent["outcome"] == "completed":
        early = sent["acknowledged_before_prefill_ended_bytes"]
        if 2 * early < sent["attention_bytes"] and "at once" not in case.name:
            faults.append(f"only {early} of {sent['attention_bytes']} attention bytes arrived before prefill ended")
    return Row(**{**row.__dict__, "fault": "; ".join(faults) or None})
