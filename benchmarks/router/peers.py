"""Other routers before the same engines: those that are installed under $PRFAAS_BENCH_PEERS, one virtual environment each.

python3 -m venv DIR/sglang-router    && DIR/sglang-router/bin/pip install sglang-router==0.3.2
python3 -m venv DIR/vllm-router      && DIR/vllm-router/bin/pip install vllm-router==0.1.17
python3 -m venv DIR/production-stack && DIR/production-stack/bin/pip install <vLLM's production stack, from its source>
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

Command = Callable[[str, str, str], tuple[str, ...]]  # From listen port, prefill URL and decode URL.


@dataclass(frozen=True)
class Peer:
    """One router in one of its modes; `disaggregates` when it sends a prefill leg and a decode leg."""

    name: str
    environment: str
    disaggregates: bool
    is_python: bool
    arguments: Command

    def command(self, port: str, prefill: str, decode: str) -> tuple[str, ...] | None:
        """Return the command that starts it; None if it is not installed."""
        root = os.environ.get("PRFAAS_BENCH_PEERS")
        python = Path(root or os.devnull) / self.environment / "bin" / "python"
        return (str(python), *self.arguments(port, prefill, decode)) if python.exists() else None


def _sglang(port: str, prefill: str, decode: str) -> tuple[str, ...]:
    flags = ("--worker-urls", decode, "--policy", "cache_aware", "--host", "127.0.0.1", "--port", port)
    return ("-m", "sglang_router.launch_router", *flags)


def _sglang_pd(port: str, prefill: str, decode: str) -> tuple[str, ...]:
    flags = ("--pd-disaggregation", "--prefill", prefill, "--decode", decode, "--host", "127.0.0.1", "--port", port)
    return ("-m", "sglang_router.launch_router", *flags)


def _vllm(port: str, prefill: str, decode: str) -> tuple[str, ...]:
    flags = ("--worker-urls", decode, "--policy", "cache_aware", "--host", "127.0.0.1", "--port", port)
    return ("-m", "vllm_router.launch_router", *flags)


def _vllm_pd(port: str, prefill: str, decode: str) -> tuple[str, ...]:
    flags = (
        "--vllm-pd-disaggregation",
        "--prefill",
        prefill,
        "--decode",
        decode,
        "--host",
        "127.0.0.1",
        "--port",
        port,
    )
    return ("-m", "vllm_router.launch_router", *flags)


def _production_stack(port: str, prefill: str, decode: str) -> tuple[str, ...]:
    served = ("--service-discovery", "static", "--static-backends", decode, "--static-models", "m")
    return ("-m", "vllm_router.app", *served, "--routing-logic", "roundrobin", "--host", "127.0.0.1", "--port", port)


def _production_stack_pd(port: str, prefill: str, decode: str) -> tuple[str, ...]:
    served = ("--service-discovery", "static", "--static-backends", f"{prefill},{decode}", "--static-models", "m,m")
    labels = ("--static-model-labels", "p,d", "--prefill-model-labels", "p", "--decode-model-labels", "d")
    logic = ("--routing-logic", "disaggregated_prefill", "--host", "127.0.0.1", "--port", port)
    return ("-m", "vllm_router.app", *served, *labels, *logic)


PEERS = (
    Peer("sglang-router, cache_aware", "sglang-router", disaggregates=False, is_python=False, arguments=_sglang),
    Peer("sglang-router, P/D", "sglang-router", disaggregates=True, is_python=False, arguments=_sglang_pd),
    Peer("vllm-router, cache_aware", "vllm-router", disaggregates=False, is_python=False, arguments=_vllm),
    Peer("vllm-router, P/D", "vllm-router", disaggregates=True, is_python=False, arguments=_vllm_pd),
    Peer("production-stack", "production-stack", disaggregates=False, is_python=True, arguments=_production_stack),
    Peer(
        "production-stack, P/D", "production-stack", disaggregates=True, is_python=True, arguments=_production_stack_pd
    ),
)


def of_kind(*, disaggregates: bool) -> Iterator[Peer]:
    """Yield the peers that do what is measured."""
    return (peer for peer in PEERS if peer.disaggregates == disaggregates)
