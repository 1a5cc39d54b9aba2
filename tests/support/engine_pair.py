"""Two real vLLM engines with an agent each. Requests go through both, or through one alone."""

import http.client
import json
import os
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prfaas import grants
from prfaas.grants import Grant
from prfaas.hashing import HashChain, root_hash
from prfaas.kv.group import resume_step_tokens
from prfaas.kv.layout import Layout
from tests.support.engine_deployment import CHUNK_TOKENS, Deployment, EngineOptions, Node
from tests.support.transfer_grants import make_grant
from tools.demo.client import REQUEST_SECONDS, Answer, complete, transfers
from tools.free_ports import free_address
from tools.link import Relay
from tools.processes import Children
from tools.stack import AgentProcess, EngineProcess, engine_flags
from tools.tiny_models import FAMILIES, make_model

NEAR_TIE_NATS = 1e-3  # A batch moves a float32 log-probability by up to 6e-5 (72 answers of 8 families).
# Full attention, sliding windows, states of Mamba2, states of a gated delta net.
REPRESENTATIVE = ("llama", "gemma3", "granite4h", "qwen3_next")
# Further models of the same kinds, short convolutions, and full attention in longer blocks than windows.
FURTHER = ("gemma4", "qwen3", "gpt_oss", "olmo3", "deepseek", "nemotron_h", "falcon_h1", "lfm2")
EXACT = [family for family in (*REPRESENTATIVE, *FURTHER) if FAMILIES[family].dtype == "float32"]
MAX_MODEL_LEN = 4608
NUM_OUTPUT_TOKENS = 24
# vLLM's rotary kernel for CPUs turns query rows of shape [token, head, dim] by positions of other tokens. The result then
# depends on the neighbours in the batch. vLLM's PyTorch form is right.
FLAGS = dict.fromkeys(("lfm2", "deepseek"), ("--compilation-config", '{"custom_ops": ["-rotary_embedding"]}'))
# Here the prefill engine runs a compiled graph: Mamba2 and short convolutions. Only Dynamo compiles it, since kernels would
# take a minute. Qwen3-Next's bfloat16 rounds differently when compiled.
COMPILED = {"nemotron_h", "lfm2"}
COMPILED_ENVIRONMENT = {"VLLM_CPU_CI_ENV": "1"}
CACHES_PREFIXES = {"qwen3_next"}  # Mamba2 on a CPU supports none.
PAIR = {"east": Node(), "west": Node()}
ACROSS_CLUSTERS = {"east": Node("east", "prfaas", "prefill"), "west": Node()}


class EnginePair(Deployment):
    """Engine in the east, which prefills, and engine in the west, which decodes. Each can do both."""

    @property
    def east(self) -> AgentProcess:
        return self.agents["east"]

    @property
    def west(self) -> AgentProcess:
        return self.agents["west"]

    @property
    def prefill(self) -> EngineProcess:
        return self.engines["east"]

    @property
    def decode(self) -> EngineProcess:
        return self.engines["west"]

    def alone(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """Return greedy tokens of the decode engine, which reuses no blocks of other requests."""
        return self.answer_alone(prompt).token_ids

    def answer_alone(self, prompt: Sequence[int]) -> Answer:
        return self._ask(self.decode, prompt, cache_salt=os.urandom(8).hex(), logprobs=0)

    def through_both(self, prompt: Sequence[int], **changes: Any) -> tuple[int, ...]:
        """Return greedy tokens of the decode engine while the east prefills the prompt except for its last token."""
        return self.answer_through_both(prompt, **changes).token_ids

    def answer_through_both(self, prompt: Sequence[int], **changes: Any) -> Answer:
        grant = self.grant(prompt, **changes)
        with ThreadPoolExecutor(2) as pool:
            decoding = pool.submit(self._decode_leg, prompt, grant)
            pool.submit(self.prefill_leg, prompt, grant).result()
            return decoding.result()

    def prefill_leg(self, prompt: Sequence[int], grant: str) -> None:
        self._ask(self.prefill, prompt[:-1], max_tokens=1, kv_transfer_params=parameters("do_remote_decode", grant))

    def decode_leg(self, prompt: Sequence[int], grant: str) -> tuple[int, ...]:
        return self._decode_leg(prompt, grant).token_ids

    def _decode_leg(self, prompt: Sequence[int], grant: str) -> Answer:
        return self._ask(self.decode, prompt, kv_transfer_params=parameters("do_remote_prefill", grant), logprobs=0)

    def locally(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """Return greedy tokens of the decode engine, which reuses what its node holds."""
        return self.at(self.decode, prompt)

    def at(self, engine: EngineProcess, prompt: Sequence[int], **fields: Any) -> tuple[int, ...]:
        return self._ask(engine, prompt, **fields).token_ids

    def _ask(self, engine: EngineProcess, prompt: Sequence[int], **fields: Any) -> Answer:
        body = {"model": self.family, "prompt": list(prompt), "temperature": 0, "ignore_eos": True}
        return complete(engine.url, {**body, "max_tokens": NUM_OUTPUT_TOKENS, **fields})

    def lead_nats(self, prompt: Sequence[int]) -> float:
        """Return the lead of the likeliest next token over the second, on the decode engine alone."""
        body = {"model": self.family, "prompt": list(prompt), "temperature": 0, "max_tokens": 1, "logprobs": 2}
        # Different tokens may have equal texts.
        body |= {"cache_salt": os.urandom(8).hex(), "return_tokens_as_token_ids": True}
        _, answer, _ = post(self.decode.url, body)
        first, second = sorted(answer["choices"][0]["logprobs"]["top_logprobs"][0].values(), reverse=True)[:2]
        return float(first - second)

    def differ_by_near_tie(self, prompt: Sequence[int], tokens: Sequence[int], expected: Sequence[int]) -> bool:
        """Return whether the engine alone is nearly undecided where two answers part."""
        pairs = enumerate(zip(tokens, expected, strict=True))
        num_same = next(index for index, (token, alone) in pairs if token != alone)
        return self.lead_nats([*prompt, *expected[:num_same]]) < NEAR_TIE_NATS

    def chain(self, prompt: Sequence[int]) -> HashChain:
        """Return the hash chain of what a transfer of `prompt` carries."""
        return HashChain(root_hash(self.family), prompt[:-1])

    def signed(self, prompt: Sequence[int], **changes: Any) -> tuple[Grant, bytes]:
        """Return a grant for `prompt` from east to west, plain and signed."""
        grant = make_grant(self.east.name, self.west, self.chain(prompt), **changes)
        return grant, grants.sign(grant, grants.derive_key(self.secret, "grant"))

    def grant(self, prompt: Sequence[int], **changes: Any) -> str:
        """Return the grant as it stands in `kv_transfer_params`."""
        return grants.to_text(self.signed(prompt, **changes)[1])

    @property
    def secret(self) -> bytes:
        return self.stack.secret_file.read_bytes()

    def nothing_is_left(self) -> bool:
        """Return whether no transfer, slot or lease is left at either agent."""
        pages = [self.agent_status(name) for name in self.agents]
        words = ("sending", "receiving", "prefix_store", "pending_claims", "leases")
        return not any(page["pool"]["transfer"] + sum(page[word] for word in words) for page in pages)

    def last_sent(self) -> dict[str, Any]:
        """Return the record of the latest transfer at the east's agent."""
        return list(transfers(self.east.status_url).values())[-1]


def parameters(direction: str, grant: str) -> dict[str, Any]:
    return {direction: True, "prfaas_grant": grant}


def post(url: str, body: Mapping[str, Any]) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Return status, JSON and headers of a server's reply to a completion, even if it is an error."""
    client = http.client.HTTPConnection(url.removeprefix("http://"), timeout=REQUEST_SECONDS)
    try:
        client.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = client.getresponse()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return response.status, json.loads(response.read()), headers
    finally:
        client.close()


def counts(engine: EngineProcess) -> dict[str, float]:
    """Return the connector's counters on the engine's metrics page, by name and labels."""
    with urllib.request.urlopen(f"{engine.url}/metrics", timeout=60) as page:
        lines = page.read().decode().splitlines()
    found = (line.rsplit(" ", 1) for line in lines if line.startswith("prfaas_connector_") and "_created" not in line)
    return {name: float(value) for name, value in found}


def outcome(direction: str, word: str) -> str:
    """Return the name of a counter in `counts`."""
    return f'prfaas_connector_transfers_total{{direction="{direction}",outcome="{word}"}}'


def num_outcomes(engine: EngineProcess, direction: str, word: str) -> int:
    return int(counts(engine).get(outcome(direction, word), 0))


def resumes_at(layout: Layout, num_tokens: int) -> int:
    """Return where a prompt with `num_tokens` held tokens resumes: at a state, or else at a block's end."""
    if any(group.is_state for group in layout.groups):
        return num_tokens
    block_tokens = max(group.block_tokens for group in layout.groups)
    return num_tokens // block_tokens * block_tokens


def held_bytes(layout: Layout, held: int, num_tokens: int) -> int:
    """Return the bytes of full blocks of the first `held` tokens that belong to a transfer of `num_tokens`."""
    total, step_tokens = 0, resume_step_tokens(layout.groups)
    for group in layout.groups:
        if not group.is_state:
            first = group.first_kept_block(num_tokens, step_tokens)
            total += group.block_bytes * max(0, held // group.block_tokens - first)
    return total


def flags(family: str) -> tuple[str, ...]:
    """Return vLLM's flags for a family."""
    chosen = engine_flags(chunk_tokens=CHUNK_TOKENS, max_model_len=MAX_MODEL_LEN)
    if family in CACHES_PREFIXES:
        chosen = tuple("--enable-prefix-caching" if flag == "--no-enable-prefix-caching" else flag for flag in chosen)
    return chosen + FLAGS.get(family, ())


@contextmanager
def running_pair(
    family: str,
    directory: Path,
    *,
    nodes: Mapping[str, Node] = PAIR,
    ranks: tuple[int, int] = (1, 1),
    extra: tuple[str, ...] = (),
    decode_extra: tuple[str, ...] = (),
    connector: Mapping[str, Any] | None = None,
    manager: Mapping[str, Any] | None = None,
    **agent_settings: Any,
) -> Iterator[EnginePair]:
    """Start a pair, with both engines at the same time, and stop it in the end.

    `ranks` are tensor-parallel sizes; `extra` are flags and `connector` keys of both engines, `decode_extra` flags of one.
    """
    make_model(family, directory / family)
    with Children(directory) as children, Relay(free_address()) as reports:
        pair = EnginePair(children, directory, family, reports)
        pair.configure(nodes, manager=manager, **agent_settings)
        pair.start_engines(_engine_options(family, ranks, extra, decode_extra, connector or {}))
        yield pair


def _engine_options(
    family: str,
    ranks: tuple[int, int],
    extra: tuple[str, ...],
    decode_extra: tuple[str, ...],
    connector: Mapping[str, Any],
) -> dict[str, EngineOptions]:
    prefilling, decoding = ((*flags(family), *extra, "--tensor-parallel-size", str(size)) for size in ranks)
    is_compiled = family in COMPILED
    east = EngineOptions(
        tuple(flag for flag in prefilling if not (is_compiled and flag == "--enforce-eager")),
        connector=connector,
        environment=COMPILED_ENVIRONMENT if is_compiled else {},
    )
    west = EngineOptions(
        (*decoding, *decode_extra),
        connector=connector,
        environment={"VLLM_SERVER_DEV_MODE": "1"},  # Serves the resets of caches.
    )
    return {"east": east, "west": west}
