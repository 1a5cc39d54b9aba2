"""Messages between the processes of one colocated instance."""

from dataclasses import dataclass
from typing import Any

from prfaas.colocate.cores import Cores


@dataclass(frozen=True)
class DecodeHello:
    """Request of the decode engine's executor for a worker.

    Attributes:
        vllm_config: Names the model.
        environment: Variables that vLLM's platform has set for its workers, such as the layout of states.
    """

    vllm_config: Any
    environment: dict[str, str]


@dataclass(frozen=True)
class PrefillHello:
    """Request of the decode engine's scheduler for a prefill worker.

    Attributes:
        kv_cache_config: KV cache that both workers use.
        max_model_len: Longest request in tokens.
        scratch_blocks: Blocks that no request ever has.
    """

    kv_cache_config: Any
    max_model_len: int
    scratch_blocks: tuple[int, ...]


@dataclass(frozen=True)
class Ready:
    """First message of a worker."""

    process: int


@dataclass(frozen=True)
class Refused:
    """Message of a fork server that could not load the model."""

    reason: str


@dataclass(frozen=True)
class UseCores:
    """Order to a prefill worker to move all threads to these cores, at once."""

    cores: Cores


@dataclass(frozen=True)
class Cancel:
    """Order to stop a prompt. `Done` follows, and its blocks are not written after that."""

    request_id: str


@dataclass(frozen=True)
class Ping:
    """Question whether a prefill worker runs. It sends the same message back."""


@dataclass(frozen=True)
class Done:
    """Report that the blocks of a prompt hold its tokens, unless it was cancelled."""

    request_id: str
