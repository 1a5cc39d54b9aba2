"""Settings of vLLM that the connector cannot work with."""

from __future__ import annotations

from typing import Any

from prfaas.errors import ConfigError


def check_supported(vllm_config: Any) -> None:
    """Refuse, by name, what would give wrong blocks.

    Raises:
        ConfigError: vLLM is set to it.
    """
    parallel = vllm_config.parallel_config
    refused = {
        "pipeline_parallel_size": parallel.pipeline_parallel_size > 1,
        "decode_context_parallel_size": parallel.decode_context_parallel_size > 1,
        "prefill_context_parallel_size": parallel.prefill_context_parallel_size > 1,
        "nnodes": getattr(parallel, "nnodes", 1) > 1,
        "enable_dbo": parallel.enable_dbo,
        "ubatch_size": parallel.ubatch_size > 1,
        "speculative_config": vllm_config.speculative_config is not None,
    }
    for name, is_refused in refused.items():
        if is_refused:
            raise ConfigError(f"PrfaasConnector does not support {name}={getattr(parallel, name, 'set')}")
