"""Costs of a request in the deployment of PPD's authors: 4 H100, Llama-3.1-8B, vLLM with P2pNcclConnector.

Fitted to half of their measured workloads (github.com/freelulul/vllm-ppd, Apache-2.0; failed rows left out);
benchmarks/twin/README.md says to which, and how far the other half is met.
"""

from __future__ import annotations

from dataclasses import dataclass

from prfaas.model.cost.curve import polynomial
from prfaas.model.cost.profile import DecodeProfile, PrefillProfile
from prfaas.sim.model.engine import InstanceSpec

# Llama-3.1-8B in bf16.
KV_BYTES_PER_TOKEN = 131_072.0
_MAX_TOKENS = 1 << 20


@dataclass(frozen=True)
class PpdModel:
    """Seconds, but for `kv_bytes_per_second`, `max_sessions`, `kv_tokens` and `chunk_tokens`.

    `overhead_*` is spent before an engine has the request (client, tokenising), `proxy_seconds` more where a node's role
    is not `both`. P prefills one prompt after the other and is kept by each for `send_busy_seconds` and
    `send_per_token_seconds` longer; the KV arrives `handover_seconds`, and its bytes at `kv_bytes_per_second`, later,
    and holds up its receiver's iteration by `load_seconds`. `max_sessions` conversations are under way at once; the first
    turns of the others wait at the client. Each decode node holds the KV of `kv_tokens`.
    """

    overhead_seconds: float = 0.0126
    proxy_seconds: float = 0.003
    overhead_per_token_seconds: float = 6e-6
    prefill_seconds: float = 0.015
    prefill_per_token_seconds: float = 29.2e-6
    send_busy_seconds: float = 0.0232
    send_per_token_seconds: float = 10.6e-6
    handover_seconds: float = 0.0118
    kv_bytes_per_second: float = 15e9
    load_seconds: float = 0.008
    decode_base_seconds: float = 7.75e-3
    decode_per_request_seconds: float = 7.5e-5
    decode_per_context_token_seconds: float = 5.05e-8
    max_sessions: float = 50
    kv_tokens: float = 400_000  # 52 GB of 80, beside 16 GB of weights
    chunk_tokens: int = 8192

    @property
    def decode_engine(self) -> InstanceSpec:
        """Return the engine of each node that decodes."""
        prefill = polynomial(self.prefill_seconds, self.prefill_per_token_seconds)
        decode = DecodeProfile(
            self.decode_base_seconds, self.decode_per_request_seconds, self.decode_per_context_token_seconds
        )
        return InstanceSpec(
            PrefillProfile(prefill, 1, _MAX_TOKENS),
            decode,
            kv_tokens=self.kv_tokens,
            chunk_tokens=self.chunk_tokens,
            load_seconds=self.load_seconds,
        )

    @property
    def prefill_engine(self) -> InstanceSpec:
        """Return the engine of P nodes."""
        prefill = polynomial(
            self.prefill_seconds + self.send_busy_seconds, self.prefill_per_token_seconds + self.send_per_token_seconds
        )
        return InstanceSpec(PrefillProfile(prefill, 1, _MAX_TOKENS), None)


@dataclass(frozen=True)
class Harness:
    """Effects of the authors' client and proxy beside the engines.

    `strayed_ratio` of the later turns went P→D although their node prefills: their TTFT has two modes, that of a local
    prefill at the median and that of P→D at the 99th percentile. `finds_answers`: prefixes that end in an answer were
    found again.
    """

    strayed_ratio: float = 0.22
    finds_answers: bool = False


MODEL = PpdModel()
GRID_HARNESS = Harness()
# Harness of the runs with up to 16 turns.
TURN_HARNESS = Harness(strayed_ratio=0.0, finds_answers=True)
