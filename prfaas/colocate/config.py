"""Every setting of `prfaas-colocate serve`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from prfaas.colocate.model.shape import SHAPES
from prfaas.config import record, setting
from prfaas.config_checks import GIVEN, check_consent, check_socket_path, check_tls
from prfaas.hashing import HASH_UNIT_TOKENS
from prfaas.transport.net.tls import TLS_DOC, Certificates, TlsConfig
from prfaas.units import choice

DTYPE_NAMES = ("float64", "float32", "bfloat16")
PARTITIONS = ("none", "affinity")
MAX_TOKENS = 500_000  # Two prompts of this length fit into a ring.


@dataclass(frozen=True)
class ColocateConfig:
    """Settings of one executor, which prefills and decodes at the same time."""

    REMOVED_SETTINGS: ClassVar[dict[str, str]] = {
        "device": "the executor runs on CPUs",
        "mps_decode_share": "the executor runs on CPUs",
    }

    listen: str = setting(
        "address", default="127.0.0.1:8200", doc="HTTP: /v1/completions, /v1/models, /healthz, /status."
    )
    insecure_plaintext: bool = setting(
        "flag", default=False, doc="Unencrypted listener beyond loopback, open to everybody."
    )
    shape: str = setting(choice(*SHAPES), default="small", doc="The model's sizes; weights are random.")
    seed: int = setting(
        "count",
        default=1,
        maximum=(1 << 63) - 1,
        doc="Seed of the weights.",
    )
    served_model_name: str = setting("text", default="prfaas-hybrid", doc="The model's name in requests.")
    dtype: str = setting(choice(*DTYPE_NAMES), default="float32", doc="Type of weights and KV.")
    num_blocks: int = setting("count", default=512, minimum=2, doc="KV blocks; one is scratch.")
    block_tokens: int = setting("count", default=16, minimum=1, doc="Tokens of a KV block.")
    max_rows: int = setting("count", default=64, minimum=1, doc="Requests in a decode batch.")
    max_requests: int = setting("count", default=128, minimum=1, doc="Requests that hold KV; further requests wait.")
    max_tokens: int = setting(
        "tokens", default=4096, minimum=2, maximum=MAX_TOKENS, doc="Longest prompt and answer together."
    )
    num_threads: int = setting(
        "count", default=0, maximum=1024, doc="Threads of each side on a CPU; 0 is one per core."
    )
    partition: str = setting(
        choice(*PARTITIONS),
        default="none",
        doc="Cores of each phase: its own (affinity), or all (none).",
    )
    profile: Path | None = setting(
        "path",
        default=None,
        doc="Colocation profile (YAML). With affinity, shares adapt to the SLO.",
    )
    itl_slo_seconds: float = setting(
        "seconds", default=0.05, minimum=1e-4, only_where={"profile": GIVEN}, doc="Longest decode step."
    )
    agent_socket: Path | None = setting(
        "path", default=None, doc="Unix socket of this machine's prfaas-agent; empty: no cache, no transfers."
    )
    tenant: str = setting(
        "text",
        default="",
        only_where={"agent_socket": GIVEN},
        doc="Salt for requests without a tenant; equal to the routers' `tenant`.",
    )
    silence_seconds: float = setting(
        "seconds",
        default=2.0,
        formerly=("open_wait_seconds",),
        only_where={"agent_socket": GIVEN},
        doc="Longest time without an answer of the agent.",
    )
    reuse_min_tokens: int = setting(
        "tokens",
        default=256,
        only_where={"agent_socket": GIVEN},
        doc="Shortest prompt or answer for the pool.",
    )
    dwell_steps: int = setting(
        "count", default=16, minimum=1, only_where={"profile": GIVEN}, doc="Steps before decode's share shrinks."
    )
    tls: TlsConfig = setting(record(TlsConfig), formerly=("tls_*",), doc=TLS_DOC)

    def __post_init__(self) -> None:
        check_tls(self)
        check_consent(self, "listen")
        if self.profile is not None and self.partition == "none":
            raise ValueError("profile: needs partition: affinity")
        if self.agent_socket is not None:
            check_socket_path("agent_socket", self.agent_socket)
            if self.block_tokens % HASH_UNIT_TOKENS:
                raise ValueError(f"block_tokens: {self.block_tokens}; with an agent a multiple of {HASH_UNIT_TOKENS}")
        held = (self.num_blocks - 1) * self.block_tokens
        if self.max_tokens > held:
            raise ValueError(f"max_tokens: {self.max_tokens} are more than num_blocks and block_tokens hold, {held}")

    def certificates(self) -> Certificates | None:
        """Return the certificates for clients, or None for plain text. Raise ConfigError for unusable ones."""
        return Certificates.of(self.tls, alpn_protocols=("http/1.1",))
