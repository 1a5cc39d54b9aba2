"""Profile of hardware that nobody has measured yet, from a model's size and a GPU's peaks.

The constants are fitted to the prefill times of six models on 8 H200 that PrfaaS (arXiv 2604.15039) Table 3 implies.
"""

from dataclasses import dataclass

from prfaas.errors import ConfigError
from prfaas.model.cost.curve import Curve, polynomial
from prfaas.model.cost.profile import DecodeProfile, PrefillProfile, Profile
from prfaas.model.kv.geometry import Geometry
from prfaas.model.kv.parameters import ModelSize

# Prefill times of a model that the fit has not seen lie within these ratios of the estimate.
BAND = (0.75, 1.35)
# Assumed, since no decode times are public: fixed seconds of a step, and shares of the peaks.
_STEP_SECONDS = 0.006
_BANDWIDTH_EFFICIENCY = 0.7
_BATCH_EFFICIENCY = 0.4
# Share of a GPU's memory that an engine uses, and bytes of it for activations.
_MEMORY_RATIO = 0.9
_ACTIVATION_BYTES = 2e9
_MAX_BATCH = 512
_MAX_TOKENS = 1 << 20


@dataclass(frozen=True)
class PrefillConstants:
    """Constants of the prefill model, fitted to measurements.

    `prompt_seconds` is the fixed time of each prompt. `attention_efficiency` is the share of the GPU's peak that
    attention reaches. `bytes_per_root_parameter` is the memory traffic of a token, divided by the square root of the
    active parameters.
    """

    prompt_seconds: float = 0.353
    bytes_per_root_parameter: float = 6.2e3
    attention_efficiency: float = 0.626


@dataclass(frozen=True)
class Gpu:
    """Peaks of one GPU: dense bf16 flops and bytes per second, bytes of memory, and a typical price per hour."""

    name: str
    flops: float
    bandwidth: float
    memory: float
    price: float
    source: str


def roofline(
    model: Geometry, gpu: Gpu, num_gpus: int, *, measured: tuple[float, float] | None = None, name: str = ""
) -> Profile:
    """Return the inferred profile of one instance of `num_gpus` GPUs that serves a model.

    `measured` is (tokens, seconds) of one prefill; the whole prefill curve is scaled to it.

    Raises:
        ConfigError: the model's size is unknown, or its weights do not fit.
    """
    size = model.size
    if size is None:
        raise ConfigError(f"model {model.name!r}: its parameters are not known; name a measured profile")
    memory = num_gpus * (_MEMORY_RATIO * gpu.memory - _ACTIVATION_BYTES) - size.weight_bytes
    if memory <= 0:
        raise ConfigError(
            f"model {model.name!r}: its weights of {size.weight_bytes / 1e9:.0f} GB do not fit {num_gpus} {gpu.name} of "
            f"{gpu.memory / 1e9:.0f} GB; write a larger gpus_per_instance "
            f'(on the command line the last number of "64x{gpu.name}:{2 * num_gpus}")'
        )
    prefill = PrefillProfile(prefill_curve(size, gpu, num_gpus), 1, _MAX_TOKENS)
    label = name or f"{num_gpus} {gpu.name}"
    low, high = BAND
    how = f"times and memory of {label} (roofline; prefill takes {low:g} to {high:g} times as long)"
    if measured is not None:
        tokens, seconds = measured
        prefill = prefill.times(seconds / prefill.seconds(tokens))
        how = f"times and memory of {label} (roofline; prefill scaled to one measured point)"
    return Profile(
        name=label,
        hardware=gpu.name,
        prefill=prefill,
        decode=_decode(model, size, num_gpus * gpu.flops, num_gpus * gpu.bandwidth),
        source=f"roofline of {model.name} on {num_gpus} {gpu.name} ({gpu.source})",
        gpus_per_instance=num_gpus,
        kv_memory_bytes=memory,
        inferred=(how,),
        model=model.name,
    )


def prefill_curve(size: ModelSize, gpu: Gpu, num_gpus: int, constants: PrefillConstants = PrefillConstants()) -> Curve:
    """Return T(l): fixed seconds, the passes of all tokens, and attention between pairs."""
    flops, fixed = num_gpus * gpu.flops, constants.prompt_seconds
    traffic = constants.bytes_per_root_parameter * size.active**0.5
    per_token = 2.0 * size.active / flops + traffic / (num_gpus * gpu.bandwidth)
    attention = flops * constants.attention_efficiency
    square, window = size.pair_flops / 2.0 / attention, size.window_pair_flops / attention
    if not window:
        return polynomial(fixed, per_token, square)
    short = (fixed, per_token, square + window / 2.0)
    width = float(size.window_tokens)
    long = (fixed - window * width**2 / 2.0, per_token + window * width, square)
    return Curve((width,), (short, long))


def _decode(model: Geometry, size: ModelSize, flops: float, bandwidth: float) -> DecodeProfile:
    """Return T_decode: each step reads all weights, and the state and KV of each request."""
    rate = bandwidth * _BANDWIDTH_EFFICIENCY
    return DecodeProfile(
        _STEP_SECONDS + size.weight_bytes / rate,
        2.0 * size.active / (flops * _BATCH_EFFICIENCY) + 2.0 * model.constant_bytes / rate,
        model.bytes_per_token / rate,
        max_batch=_MAX_BATCH,
    )
