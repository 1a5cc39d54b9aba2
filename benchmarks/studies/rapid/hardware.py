"""Costs of Llama-70B and Mixtral 8x7B on eight MI300X, inferred from RAPID-Serve's paper (arXiv 2601.11822).

The paper prints ratios, no latencies. Peaks are the vendor's (1,307 Tflop/s of bf16, 5.3 TB/s, 192 GB a GPU); the
efficiencies and the iteration's fixed part are set so that its ratios for chunks, transfer and shares come out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from prfaas.model.cost.curve import polynomial
from prfaas.model.cost.profile import DecodeProfile, PrefillProfile
from prfaas.sim.model.engine import InstanceSpec

# Data of one MI300X.
_PEAK_FLOPS, _PEAK_BYTES_PER_SECOND, _MEMORY_BYTES = 1.307e15, 5.3e12, 192e9
_MAX_TOKENS = 1 << 20


@dataclass(frozen=True)
class Model:
    """A model as its costs need it: weights of a token's pass and of all, KV of a token, attention flops of l² tokens."""

    active_parameters: float
    parameters: float
    kv_bytes_per_token: float
    attention_flops_per_square_token: float


LLAMA_70B = Model(70.6e9, 70.6e9, 327_680.0, 2 * 80 * 8192.0)
MIXTRAL_8X7B = Model(12.9e9, 46.7e9, 131_072.0, 2 * 32 * 4096.0)


@dataclass(frozen=True)
class Efficiency:
    """Shares of the peaks that an engine reaches, and what an iteration takes beside them.

    `iteration_seconds` is an iteration with a chunk (scheduling, launches, small kernels), `step_seconds` a decode step.
    `parallel_loss` is what each doubling of the tensor parallelism costs of the speed of the GPUs together.
    """

    compute: float = 0.5
    memory: float = 0.6
    iteration_seconds: float = 0.011
    step_seconds: float = 0.02
    request_seconds: float = 5e-5
    parallel_loss: float = 0.1


@dataclass(frozen=True)
class Group:
    """Some GPUs that serve a model as one engine."""

    model: Model
    num_gpus: int
    efficiency: Efficiency = Efficiency()
    max_batch: int = 256

    @cached_property
    def scale(self) -> float:
        """GPUs that it counts as, against eight without loss."""
        doublings = self.num_gpus.bit_length() - 1
        return self.num_gpus * float((1.0 - self.efficiency.parallel_loss) ** doublings)

    @property
    def prefill(self) -> PrefillProfile:
        """Without the fixed part of an iteration; RAPID's prefill runs whole prompts, whose launches are hidden."""
        flops = _PEAK_FLOPS * self.efficiency.compute * self.scale
        linear = 2 * self.model.active_parameters / flops
        square = self.model.attention_flops_per_square_token / flops
        return PrefillProfile(polynomial(self.efficiency.iteration_seconds, linear, square), 1, _MAX_TOKENS)

    @property
    def decode(self) -> DecodeProfile:
        speed = _PEAK_BYTES_PER_SECOND * self.efficiency.memory * self.scale
        weights = 2 * self.model.parameters / speed
        return DecodeProfile(
            self.efficiency.step_seconds + weights,
            self.efficiency.request_seconds,
            self.model.kv_bytes_per_token / speed,
        )

    @property
    def kv_tokens(self) -> float:
        """Return the KV tokens that fit beside the weights, with a tenth left for activations."""
        memory = 0.9 * _MEMORY_BYTES * self.num_gpus - 2 * self.model.parameters
        return memory / self.model.kv_bytes_per_token

    def engine(self, *, chunk_tokens: int | None = None) -> InstanceSpec:
        """It prefills and decodes."""
        return InstanceSpec(self.prefill, self.decode, self.max_batch, self.kv_tokens, chunk_tokens)
