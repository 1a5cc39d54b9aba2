"""RAPID-Serve's comparison: the same eight GPUs as one shared node, as one node with chunks, or as 4 prefill and 4 decode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from benchmarks.studies.rapid.hardware import Efficiency, Group, Model
from prfaas.model.cost.colocation import SharingSpeeds
from prfaas.model.cost.curve import polynomial
from prfaas.model.cost.profile import PrefillProfile
from prfaas.scheduler.colocation import SharingPolicy
from prfaas.scheduler.snapshot import InstanceState, Snapshot
from prfaas.sim.model.request import SimulatedRequest
from prfaas.sim.model.sharing import SharingSpec, modelled_speeds
from prfaas.sim.scenario import GoodputSection
from prfaas.sim.summary import CountingRules, Summary, summarise
from prfaas.sim.twin import NetworkSpec, RoutingRules, SimulatedNode, Twin
from prfaas.types import AgentName, ClusterName, InstanceId, InstanceRole, LocalPolicy

_NUM_GPUS = 8
_CLUSTER = ClusterName("pd")
# Requests per second that saturate every system.
_AT_ONCE = 1e4
TTFT_SECONDS_PER_THOUSAND = 1.0


@dataclass(frozen=True)
class Trace:
    """Log-normal prompts with this mean, exponential answers; the paper names the data sets and the mean prompt only."""

    name: str
    mean_prompt_tokens: float
    mean_output_tokens: float = 256.0
    sigma: float = 0.6

    def requests(self, count: int, rate: float, seed: int) -> list[SimulatedRequest]:
        """Poisson arrivals at `rate` per second."""
        generator = np.random.default_rng(seed)
        times = np.cumsum(generator.exponential(1 / rate, count))
        mu = np.log(self.mean_prompt_tokens) - self.sigma**2 / 2
        prompts = np.clip(generator.lognormal(mu, self.sigma, count), 16, 8 * self.mean_prompt_tokens).astype(int)
        outputs = np.maximum(generator.exponential(self.mean_output_tokens, count), 2).astype(int)
        columns = zip(times.tolist(), prompts.tolist(), outputs.tolist(), strict=True)
        return [
            SimulatedRequest(index, time, num_prompt_tokens=prompt, num_output_tokens=output)
            for index, (time, prompt, output) in enumerate(columns)
        ]


TRACES = (Trace("LMSYS", 2_000), Trace("arXiv", 8_000), Trace("long", 20_000))


@dataclass(frozen=True)
class Transfer:
    """Cost of the hand-over for a disaggregated pair: P sends for `busy_seconds` and its bytes at `busy_bytes_per_second`
    in the place of computing; then the KV is on its way at `bytes_per_second`, and D computes the first token again."""

    busy_seconds: float = 0.015
    busy_bytes_per_second: float = 11e9
    bytes_per_second: float = 7e9


FREE_TRANSFER = Transfer(0.0, float("inf"), float("inf"))


@dataclass(frozen=True)
class Setting:
    """A model on the eight GPUs, its ITL objective in seconds, what a hand-over costs, and how both sides share a device."""

    model: Model
    itl_slo_seconds: float
    transfer: Transfer = Transfer()
    speeds: SharingSpeeds = field(default_factory=modelled_speeds)
    efficiency: Efficiency = field(default_factory=Efficiency)

    def group(self, num_gpus: int) -> Group:
        """Return so many of the GPUs as one engine."""
        return Group(self.model, num_gpus, self.efficiency)


def _shared(setting: Setting) -> list[SimulatedNode]:
    spec = setting.group(_NUM_GPUS).engine()
    return [
        SimulatedNode(
            _state("rapid", "both"),
            spec,
            sharing=SharingSpec(SharingPolicy(setting.itl_slo_seconds), setting.speeds),
        )
    ]


def _chunked(setting: Setting, chunk_tokens: int) -> list[SimulatedNode]:
    return [SimulatedNode(_state("chunked", "both"), setting.group(_NUM_GPUS).engine(chunk_tokens=chunk_tokens))]


def _disaggregated(setting: Setting) -> list[SimulatedNode]:
    spec = setting.group(_NUM_GPUS // 2).engine()
    per_token = setting.model.kv_bytes_per_token / setting.transfer.busy_bytes_per_second
    busy = polynomial(setting.transfer.busy_seconds, per_token)
    slower = replace(
        spec, prefill=PrefillProfile(spec.prefill.fresh.plus(busy), 1, spec.prefill.max_tokens), decode=None
    )
    return [SimulatedNode(_state("prefill", "prefill"), slower), SimulatedNode(_state("decode", "decode"), spec)]


def _state(name: str, role: InstanceRole) -> InstanceState:
    return InstanceState(InstanceId(name), _CLUSTER, "pd", role, AgentName(name))


SYSTEMS: Mapping[str, Callable[[Setting], list[SimulatedNode]]] = MappingProxyType({
    "rapid": _shared,
    "chunked-512": lambda setting: _chunked(setting, 512),
    "chunked-1024": lambda setting: _chunked(setting, 1024),
    "chunked-2048": lambda setting: _chunked(setting, 2048),
    "disaggregated": _disaggregated,
})  # fmt: skip


def _run(system: str, setting: Setting, requests: list[SimulatedRequest]) -> Twin:
    policy: LocalPolicy = "pd" if system == "disaggregated" else "decode"
    kv = polynomial(0.0, setting.model.kv_bytes_per_token)
    wires = NetworkSpec(kv, {}, intra_bytes_per_second=setting.transfer.bytes_per_second)
    twin = Twin(SYSTEMS[system](setting), wires, RoutingRules(Snapshot(1 << 40, (), local_policy=policy)))
    twin.run(requests)
    return twin


class RapidSlo(GoodputSection):
    """Objectives of the paper: its TTFT applies per started 1,000 prompt tokens."""

    def met(self, request: SimulatedRequest) -> bool:
        bound = TTFT_SECONDS_PER_THOUSAND * -(-request.num_prompt_tokens // 1000)
        return request.ttft <= bound and super().met(request)


def run(system: str, setting: Setting, trace: Trace, *, rate: float, count: int = 400, seed: int = 1) -> Summary:
    """Return one system under one trace at `rate` requests per second."""
    twin = _run(system, setting, trace.requests(count, rate, seed))
    slo = RapidSlo(tpot=setting.itl_slo_seconds)
    return summarise(twin.requests, CountingRules(slo))


def saturated_throughput(system: str, setting: Setting, trace: Trace, *, count: int = 400) -> float:
    """Requests per second while all wait that there will be, from the first tenth of them answered to the last."""
    twin = _run(system, setting, trace.requests(count, _AT_ONCE, 1))
    ends = sorted(request.decode_end for request in twin.requests)
    first, last = count // 10, count - count // 10
    return (last - first) / (ends[last] - ends[first])
