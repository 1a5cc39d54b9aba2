"""Check for settings of vLLM that the connector does not support."""

from __future__ import annotations

from typing import Any

from prfaas.errors import ConfigError


def check_supported(vllm_config: Any) -> None:
    """Refuse settings under which blocks would be wrong.

    Raises:
        ConfigError: vLLM has such a setting; the message names it.
    """
    parallel = vllm_config.parallel_config
    unsupported = {
        "pipeline_parallel_size": parallel.pipeline_parallel_size > 1,
        "decode_context_parallel_size": parallel.decode_context_parallel_size > 1,
        "prefill_context_parallel_size": parallel.prefill_context_parallel_size > 1,
        "nnodes": getattr(parallel, "nnodes", 1) > 1,
        "enable_dbo": parallel.enable_dbo,
        "ubatch_size": parallel.ubatch_size > 1,
        "speculative_config": vllm_config.speculative_config is not None,
    }
    for name, is_set in unsupported.items():
        if is_set:
            raise ConfigError(f"PrfaasConnector does not support {name}={getattr(parallel, name, 'set')}")
