"""Process with one vLLM engine under MultiConnector: PrfaasConnector, then OffloadingConnector over the agent's pool.

Usage: python -m tests.support.offloading_engine MODEL AGENT_SOCKET AGENT_STATUS_URL NUM_CHUNKS < PROMPTS
It writes tokens and cached tokens of each prompt as JSON. It ends once the pool holds so many chunks.
"""

import json
import sys
from typing import Any

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

from tests.support.waiting import wait_until
from tools.demo.client import get_json

SAMPLING = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def transfer_config(agent_socket: str) -> KVTransferConfig:
    """Return the configuration of both connectors."""
    settings = {"agent_socket": agent_socket, "silence_seconds": "30s"}
    tier = {"type": "PrfaasTier", "module_path": "prfaas.connector.vllm.tier"} | settings
    spec = {"spec_name": "HostOffloadingSpec", "spec_module_path": "tests.support.host_offloading"}
    connectors: list[dict[str, Any]] = [
        {"kv_connector": "PrfaasConnector", "kv_connector_extra_config": settings | {"reuse": False}},
        {
            "kv_connector": "OffloadingConnector",
            "kv_connector_extra_config": spec | {"cpu_bytes_to_use": 64 << 20, "secondary_tiers": [tier]},
        },
    ]
    return KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"connectors": [connector | {"kv_role": "kv_both"} for connector in connectors]},
    )


def main(model: str, agent_socket: str, status_url: str, num_chunks: str) -> None:
    """Answer the prompts one after the other."""
    llm = LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=True,
        max_model_len=2048,
        max_num_batched_tokens=256,
        max_num_seqs=8,
        kv_cache_memory_bytes=64 << 20,
        skip_tokenizer_init=True,
        kv_transfer_config=transfer_config(agent_socket),
    )
    answers = []
    for prompt in json.load(sys.stdin):
        (answer,) = llm.generate([{"prompt_token_ids": prompt}], SAMPLING, use_tqdm=False)
        answers.append([list(answer.outputs[0].token_ids), answer.num_cached_tokens])

    def is_stored() -> bool:
        # vLLM moves chunks while it steps.
        llm.generate([{"prompt_token_ids": [1, 2, 3]}], SAMPLING, use_tqdm=False)
        return get_json(f"{status_url}/status")["pool"]["prefix"] >= int(num_chunks)  # type: ignore[no-any-return]

    wait_until(is_stored, what="the chunks in the pool")
    sys.stdout.write(f"{json.dumps(answers)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
