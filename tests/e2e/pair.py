"""Two real vLLM servers of a tiny model with an agent each: requests through both, or through one alone."""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prfaas import grants
from prfaas.grants import Grant
from prfaas.hashing import HashChain, root_hash
from prfaas.kv.layout import Layout
from prfaas.types import AgentName, TransferId
from tools.demo.client import REQUEST_SECONDS, Answer, complete, get_json, is_answering, prompt_tokens, transfers
from tools.processes import Child, Children
from tools.stack import START_SECONDS, AgentProcess, EngineProcess, Stack, attached_layout, engine_flags
from tools.tiny_models import FAMILIES, VOCABULARY, make_model

# Dense; with sliding windows; with states of Mamba2, short convolutions and a gated delta net.
PAIRS = ("llama", "qwen3", "gemma3", "gpt_oss", "olmo3", "granite4h", "nemotron_h", "falcon_h1", "lfm2", "qwen3_next")
EXACT = [family for family in PAIRS if FAMILIES[family].dtype == "float32"]
CHUNK_TOKENS = 256
MAX_MODEL_LEN = 4608
NUM_OUTPUT_TOKENS = 24
GRANT_SECONDS = 60.0
PATIENT = {"open_wait_seconds": "30s"}  # of connectors: that a busy machine's agent is slow is not what is tested
# vLLM's rotary kernel for CPUs turns the rows of queries shaped [token, head, dim], as LFM2's are, by other tokens'
# positions: what a request computes then depends on its neighbours in the batch. vLLM's own PyTorch form is right.
NO_ROTARY_KERNEL = ("--compilation-config", '{"custom_ops": ["-rotary_embedding"]}')
FLAGS = {"lfm2": NO_ROTARY_KERNEL}
# When decode requests get engine blocks: each way on dense KV, with windows and with states.
ADMISSIONS = {"qwen3": "auto", "gpt_oss": "preallocate", "nemotron_h": "preallocate", "falcon_h1": "auto"}
LOAD_FAILURE_POLICIES = {"gpt_oss": "fail"}  # the others recompute
# Of these the prefill engine runs a compiled graph: Mamba2 and short convolutions. It is compiled by Dynamo alone; kernels
# would take a minute, and nothing is said of them here. Qwen3-Next's bfloat16 rounds differently when compiled.
COMPILED = {"nemotron_h", "lfm2"}
COMPILED_ENVIRONMENT = {"VLLM_CPU_CI_ENV": "1"}
CACHES_PREFIXES = {"qwen3_next"}  # Mamba2 on a CPU has none; the others are compared without


@dataclass
class Pair:
    """An engine in the east, which prefills, and one in the west, which decodes; each can do either."""

    family: str
    east: AgentProcess
    west: AgentProcess
    prefill: EngineProcess
    decode: EngineProcess
    grant_key: bytes
    children: Children
    manager: str = ""  # its gRPC address, where there is one

    def restart_decode(self) -> None:
        """Kill the decode engine and start it again at the same place."""
        child, url = self.children.kill_and_restart(self.decode.child), self.decode.url
        self.children.wait_until(child, lambda: is_answering(f"{url}/health"), seconds=START_SECONDS)
        self.decode = EngineProcess(child, url)

    def alone(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """Greedy tokens of the decode engine on its own; shares no cached block with other requests."""
        return self.answer_alone(prompt).token_ids

    def answer_alone(self, prompt: Sequence[int]) -> Answer:
        """The same with log-probabilities."""
        return self._ask(self.decode, prompt, cache_salt=os.urandom(8).hex(), logprobs=0)

    def through_both(self, prompt: Sequence[int], **changes: Any) -> tuple[int, ...]:
        """Greedy tokens of the decode engine when the prompt but its last token is prefilled in the east, at the same time."""
        return self.answer_through_both(prompt, **changes).token_ids

    def answer_through_both(self, prompt: Sequence[int], **changes: Any) -> Answer:
        """The same with log-probabilities."""
        grant = self.grant(prompt, **changes)
        with ThreadPoolExecutor(2) as pool:
            decoding = pool.submit(self._decode_leg, prompt, grant)
            pool.submit(self.prefill_leg, prompt, grant).result()
            return decoding.result()

    def prefill_leg(self, prompt: Sequence[int], grant: str) -> None:
        """The prefill request of a transfer; its one token is of no use."""
        self._ask(self.prefill, prompt[:-1], max_tokens=1, kv_transfer_params=_parameters("do_remote_decode", grant))

    def decode_leg(self, prompt: Sequence[int], grant: str) -> tuple[int, ...]:
        """The decode request of a transfer."""
        return self._decode_leg(prompt, grant).token_ids

    def _decode_leg(self, prompt: Sequence[int], grant: str) -> Answer:
        return self._ask(self.decode, prompt, kv_transfer_params=_parameters("do_remote_prefill", grant), logprobs=0)

    def lead_nats(self, prompt: Sequence[int]) -> float:
        """By how much the likeliest next token of a prompt leads the next one, on the decode engine alone."""
        body = {"model": self.family, "prompt": list(prompt), "temperature": 0, "max_tokens": 1, "logprobs": 2}
        body |= {"cache_salt": os.urandom(8).hex(), "return_tokens_as_token_ids": True}  # texts may be equal
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.decode.url}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as response:
            likeliest = json.load(response)["choices"][0]["logprobs"]["top_logprobs"][0]
        first, second = sorted(likeliest.values(), reverse=True)[:2]
        return float(first - second)

    def locally(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """Greedy tokens of the decode engine, which takes up what its node holds."""
        return self.at(self.decode, prompt)

    def at(self, engine: EngineProcess, prompt: Sequence[int], **more: Any) -> tuple[int, ...]:
        """The same of either engine."""
        return self._ask(engine, prompt, **more).token_ids

    def _ask(self, engine: EngineProcess, prompt: Sequence[int], **extra: Any) -> Answer:
        body = {"model": self.family, "prompt": list(prompt), "temperature": 0, "ignore_eos": True}
        return complete(engine.url, {**body, "max_tokens": NUM_OUTPUT_TOKENS, **extra})

    def chain(self, prompt: Sequence[int]) -> HashChain:
        """The hashes of what a transfer of `prompt` carries."""
        return HashChain(root_hash(self.family), prompt[:-1])

    def signed(self, prompt: Sequence[int], **changes: Any) -> tuple[Grant, bytes]:
        """A grant for `prompt` from east to west, and as its two agents accept it."""
        grant = Grant(
            transfer_id=TransferId(os.urandom(16)),
            source=AgentName(self.east.name),
            destination=AgentName(self.west.name),
            destination_address=self.west.wire,
            prompt_hash=self.chain(prompt).at(len(prompt) - 1),
            num_tokens=len(prompt) - 1,
            max_bytes=1 << 28,
            tenant="",
            expires_at=time.time() + GRANT_SECONDS,
        )
        grant = replace(grant, **changes)
        return grant, grants.sign(grant, self.grant_key)

    def grant(self, prompt: Sequence[int], **changes: Any) -> str:
        """The grant as it stands in `kv_transfer_params`."""
        return grants.to_text(self.signed(prompt, **changes)[1])

    def nothing_is_left(self) -> bool:
        """Whether no transfer is under way in either agent, and no slot or lease of one is left."""
        pages = [get_json(f"{agent.status_url}/status") for agent in (self.east, self.west)]
        words = ("sending", "receiving", "prefix_store", "pending_claims", "leases")
        return not any(page["pool"]["transfer"] + sum(page[word] for word in words) for page in pages)

    def last_sent(self) -> dict[str, Any]:
        """What the east's agent says of its latest transfer."""
        return list(transfers(self.east.status_url).values())[-1]

    def layout(self) -> Layout:
        """The decode engine's layout, from its log."""
        return attached_layout(self.decode.child.log)


def _parameters(direction: str, grant: str) -> dict[str, Any]:
    return {direction: True, "prfaas_grant": grant}


def post(url: str, body: Mapping[str, Any]) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Status, JSON and headers of what a server answers to a completion, whatever it answers."""
    client = http.client.HTTPConnection(url.removeprefix("http://"), timeout=REQUEST_SECONDS)
    try:
        client.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = client.getresponse()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return response.status, json.loads(response.read()), headers
    finally:
        client.close()


def counts(engine: EngineProcess) -> dict[str, float]:
    """The connector's counters on the engine's own metrics page, by name and labels."""
    with urllib.request.urlopen(f"{engine.url}/metrics", timeout=60) as page:
        lines = page.read().decode().splitlines()
    found = (line.rsplit(" ", 1) for line in lines if line.startswith("prfaas_connector_") and "_created" not in line)
    return {name: float(value) for name, value in found}


def outcome(direction: str, word: str) -> str:
    """The name of a counter in `counts`."""
    return f'prfaas_connector_transfers_total{{direction="{direction}",outcome="{word}"}}'


def resumes_at(layout: Layout, num_tokens: int) -> int:
    """Where a prompt that begins with `num_tokens` held ones is resumed: at a state, or else at a block's end."""
    if any(group.is_state for group in layout.groups):
        return num_tokens
    block_tokens = max(group.block_tokens for group in layout.groups)
    return num_tokens // block_tokens * block_tokens


def held_bytes(layout: Layout, held: int, num_tokens: int) -> int:
    """What resuming after `num_tokens` reads of the full blocks of the first `held` tokens."""
    total = 0
    for group in layout.groups:
        if not group.is_state:
            window = group.window_tokens or num_tokens + 1
            first = max(0, num_tokens - window + 1) // group.block_tokens
            total += group.block_bytes * max(0, held // group.block_tokens - first)
    return total


def random_prompt(length: int, *, seed: int) -> list[int]:
    return prompt_tokens(length, seed=seed, vocabulary=VOCABULARY)


def flags(family: str) -> tuple[str, ...]:
    """vLLM's flags for a family."""
    chosen = engine_flags(chunk_tokens=CHUNK_TOKENS, max_model_len=MAX_MODEL_LEN)
    if family in CACHES_PREFIXES:
        chosen = tuple("--enable-prefix-caching" if flag == "--no-enable-prefix-caching" else flag for flag in chosen)
    return chosen + FLAGS.get(family, ())


@contextmanager
def running_pair(
    family: str,
    directory: Path,
    *,
    ranks: tuple[int, int] = (1, 1),
    extra: tuple[str, ...] = (),
    connector: Mapping[str, Any] | None = None,
    has_manager: bool = False,
) -> Iterator[Pair]:
    """Start everything, both engines at the same time, each in so many ranks; stop it in the end.

    `extra` are flags, `connector` keys of both engines. With a manager the agents are two decode nodes of one cluster.
    """
    model = make_model(family, directory / family)
    with Children(directory) as children:
        stack = Stack(children, directory)
        manager, node = _start_manager(stack, directory) if has_manager else (None, {})
        east, west = (stack.start_agent(name, reconnect_seconds="60s", **node) for name in ("east", "west"))
        stack.await_agent(east)
        stack.await_agent(west)
        prefilling, decoding = ((*flags(family), *extra, "--tensor-parallel-size", str(rank)) for rank in ranks)
        is_compiled = family in COMPILED
        prefill = stack.start_engine(
            "east",
            model,
            agent=east,
            role="kv_both",
            extra=tuple(its for its in prefilling if not (is_compiled and its == "--enforce-eager")),
            connector={**PATIENT, **(connector or {})},
            environment=COMPILED_ENVIRONMENT if is_compiled else {},
        )
        decode = stack.start_engine(
            "west",
            model,
            agent=west,
            role="kv_both",
            extra=decoding,
            connector={**PATIENT, "admission": ADMISSIONS.get(family, "wait"), **(connector or {})},
            load_failure=LOAD_FAILURE_POLICIES.get(family, "recompute"),
            environment={"VLLM_SERVER_DEV_MODE": "1"},  # serves what resets its caches
        )
        for engine in (prefill, decode):
            stack.await_server(engine.child, engine.url)
        if manager is not None:
            manager.await_nodes(children)
        key = grants.derive_key(stack.secret_file.read_bytes(), "grant")
        yield Pair(family, east, west, prefill, decode, key, children, manager.address if manager else "")


@dataclass(frozen=True)
class _Manager:
    child: Child
    address: str  # gRPC
    url: str

    def await_nodes(self, children: Children) -> None:
        """Return once it knows both nodes."""
        children.wait_until(self.child, lambda: is_answering(f"{self.url}/healthz"), seconds=START_SECONDS)
        children.wait_until(
            self.child, lambda: {"east", "west"} <= set(get_json(f"{self.url}/digests")), seconds=START_SECONDS
        )


def _start_manager(stack: Stack, directory: Path) -> tuple[_Manager, dict[str, Any]]:
    """A manager, and what an agent's settings say of it."""
    settings = {"redis_directory": str(directory / "redis"), "rebalance_bytes_per_second": "0Gbps"}
    its = _Manager(*stack.start_manager(heartbeat_seconds="1s", expiry_seconds="60s", **settings))
    return its, {"managers": [its.address], "cluster": "west", "cluster_kind": "pd"}
