"""Adapters and several answers per request on real engines: equal tokens, with a counted reason where no KV travels."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.engine_deployment import CHUNK_TOKENS, random_prompt
from tests.support.engine_pair import EnginePair, num_outcomes, parameters, post, running_pair
from tests.support.waiting import wait_until
from tools.demo.client import prefilled_tokens

pytestmark = [pytest.mark.vllm, pytest.mark.soak, pytest.mark.timeout(1800)]
ADAPTER, RANK, WIDTH = "adapter", 8, 128  # The width of the tiny model.


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnginePair]:
    directory = tmp_path_factory.mktemp("features")
    adapter = _write_adapter(directory / ADAPTER)
    flags = ("--enable-lora", "--max-lora-rank", str(RANK), "--lora-modules", f"{ADAPTER}={adapter}")
    with running_pair("llama", directory, extra=flags) as running:
        yield running


def _write_adapter(directory: Path) -> Path:
    """Write a random adapter of the query projections."""
    directory.mkdir()
    source, weights = torch.Generator().manual_seed(5), {}
    for layer in range(4):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        for part, shape in (("lora_A", (RANK, WIDTH)), ("lora_B", (WIDTH, RANK))):
            weights[f"{name}.{part}.weight"] = torch.randn(shape, generator=source) * 0.3
    save_file(weights, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj"], "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "llama"}))
    return directory


def test_an_adapter_reuses_its_own_blocks_and_none_of_the_base_model(adapted: EnginePair) -> None:
    engine, prompt = adapted.decode, random_prompt(3 * CHUNK_TOKENS, seed=1)
    expected = adapted.at(engine, prompt, model=ADAPTER, cache_salt="alone")
    assert expected != adapted.at(engine, prompt, cache_salt="alone"), "the adapter changes the answer"
    adapted.locally(prompt)
    wait_until(adapted.has_healed, what="stored blocks")
    for num_computed in (len(prompt), CHUNK_TOKENS // 2):
        before = prefilled_tokens(engine.url)
        assert adapted.at(engine, prompt, model=ADAPTER) == expected
        assert prefilled_tokens(engine.url) - before == num_computed
        wait_until(adapted.has_healed, what="stored blocks")


def test_the_grant_of_a_base_model_transfers_nothing_to_an_adapter(adapted: EnginePair) -> None:
    prompt = random_prompt(2 * CHUNK_TOKENS, seed=2)
    refused = num_outcomes(adapted.decode, "receive", "prompt_mismatch")
    expected = adapted.at(adapted.decode, prompt, model=ADAPTER, cache_salt="alone")
    leg = {"kv_transfer_params": parameters("do_remote_prefill", adapted.grant(prompt))}
    assert adapted.at(adapted.decode, prompt, model=ADAPTER, **leg) == expected
    assert num_outcomes(adapted.decode, "receive", "prompt_mismatch") == refused + 1


def test_several_answers_of_one_request_equal_those_of_single_requests(adapted: EnginePair) -> None:
    """The first answer takes the transfer. The others find it in use or ended, and compute the prompt."""
    prompt = random_prompt(2 * CHUNK_TOKENS, seed=3)
    grant = adapted.grant(prompt)
    expected = adapted.alone(prompt)
    adapted.prefill_leg(prompt, grant)
    answers = _answers(adapted, prompt, n=3, kv_transfer_params=parameters("do_remote_prefill", grant))
    assert answers == [expected] * 3
    others = [num_outcomes(adapted.decode, "receive", word) for word in ("in_use", "cancelled")]
    assert sum(others) == 2 and num_outcomes(adapted.decode, "receive", "completed") == 1


def _answers(pair: EnginePair, prompt: Sequence[int], **fields: Any) -> list[tuple[int, ...]]:
    body = {"model": pair.family, "prompt": list(prompt), "max_tokens": 24, "ignore_eos": True, "temperature": 0}
    # vLLM refuses several greedy answers, so every answer is sampled from the likeliest token alone.
    body |= {"temperature": 1.0, "top_k": 1, "return_token_ids": True}
    status, answer, _ = post(pair.decode.url, {**body, **fields})
    assert status == 200, answer
    return [tuple(choice["token_ids"]) for choice in answer["choices"]]
