"""Constants of the PPD and RAPID-Serve experiments with their sources, for benchmarks/twin/README.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from inspect import signature
from typing import Any

from benchmarks.studies.ppd import interference
from benchmarks.studies.ppd.model import GRID_HARNESS, MODEL
from benchmarks.studies.rapid.experiment import TRACES, TTFT_SECONDS_PER_THOUSAND, Transfer
from benchmarks.studies.rapid.hardware import Efficiency
from prfaas.sim.model.sharing import modelled_speeds

Row = tuple[str, str, str]
_FITTED = "fitted to turn-2 TTFT and TPOT of nine workloads at 2, 8 and 16 QPS"
_CONVERSATIONS = (
    "inferred, where answers outlast the arrivals: of 50 conversations no first turn waits at the authors' client, of 60 "
    "some do; the median one waits from 106 conversations on and does not with 90, and of twice the limit half wait"
)
PPD_SOURCES = {
    "overhead_seconds": _FITTED,
    "proxy_seconds": _FITTED,
    "overhead_per_token_seconds": _FITTED,
    "prefill_seconds": _FITTED,
    "prefill_per_token_seconds": _FITTED,
    "send_busy_seconds": _FITTED,
    "send_per_token_seconds": _FITTED,
    "handover_seconds": _FITTED,
    "kv_bytes_per_second": _FITTED,
    "load_seconds": _FITTED,
    "decode_base_seconds": _FITTED,
    "decode_per_request_seconds": _FITTED,
    "decode_per_context_token_seconds": _FITTED,
    "max_sessions": _CONVERSATIONS,
    "kv_tokens": "52 GB of an H100's 80, beside the weights; no run of the grid needs them",
    "chunk_tokens": "vLLM's budget of an iteration, assumed",
    "strayed_ratio": "the two modes of later turns' TTFT in the grid; 0 in the runs of many turns",
    "finds_answers": "prefixes that end in an answer are not found again in the grid; they are in the runs of many turns",
}
RAPID_SOURCES = {
    "compute": "assumed: share of the vendor's 1,307 Tflop/s of bf16 that is reached",
    "memory": "assumed: share of the vendor's 5.3 TB/s that is reached",
    "iteration_seconds": "set by the chunk law, +20 % throughput and +30 % ITL",
    "step_seconds": "set by the chunk law",
    "request_seconds": "assumed",
    "parallel_loss": "assumed, for each doubling of tensor parallelism",
    "busy_seconds": "set by: a free transfer gives 1.4 times the throughput",
    "busy_bytes_per_second": "set by the same",
    "bytes_per_second": "set by: transfer costs 1.9 times the TTFT",
    "decode_peak_share": "the paper: near its peak at 40 to 50 % of the units",
    "decode_memory_ratio": "the paper: 2 to 5 %",
    "prefill_memory_ratio": "the paper: up to 2 %",
    "overallocated_prefill": "assumed; **lowered from 0.8 while looking at the gains**",
    "overallocated_decode": "assumed",
}


def ppd_rows() -> Iterator[Row]:
    """Yield the costs and the harness, then the interference law."""
    for constants in (MODEL, GRID_HARNESS):
        yield from _rows(asdict(constants), PPD_SOURCES)
    law = "fitted to the even tens of decoding requests, absolute error"
    for name, value in sorted(vars(interference).items()):
        if isinstance(value, float):
            yield f"interference: `{name.strip('_').lower()}`", f"{value:g}", law


def rapid_rows() -> Iterator[Row]:
    """Yield hardware, hand-over and sharing, then the traces."""
    speeds = {name: parameter.default for name, parameter in signature(modelled_speeds).parameters.items()}
    for constants in (asdict(Efficiency()), asdict(Transfer()), speeds):
        yield from _rows(constants, RAPID_SOURCES)
    for trace in TRACES:
        shape = f"{trace.mean_prompt_tokens:g} / {trace.mean_output_tokens:g} / {trace.sigma:g}"
        yield f"{trace.name}: mean prompt, mean answer, sigma", shape, "the paper's mean prompt; the rest assumed"
    yield "TTFT objective for each started 1,000 tokens", f"{TTFT_SECONDS_PER_THOUSAND:g} s", "the paper"


def _rows(constants: Mapping[str, Any], sources: Mapping[str, str]) -> Iterator[Row]:
    for name, value in constants.items():
        yield f"`{name}`", value if isinstance(value, str) else f"{value:g}", sources[name]
