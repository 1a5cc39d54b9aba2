"""Every setting of `prfaas-colocate serve`."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from prfaas.config import record, setting
from prfaas.config_checks import GIVEN, check_consent, check_socket_path, check_tls
from prfaas.transport.net.tls import TLS_DOC, TlsConfig

_VLLM = "a flag of vLLM, behind `--`"


@dataclass(frozen=True)
class ColocateConfig:
    """Settings of one colocated instance. Flags behind `--` go to vLLM's server as they are."""

    REMOVED_SETTINGS: ClassVar[dict[str, str]] = {
        "device": "a colocated instance runs on CPUs",
        "mps_decode_share": "a colocated instance runs on CPUs",
        "shape": "a colocated instance runs the models of vLLM: `model`",
        "seed": "a colocated instance runs the models of vLLM: `model`",
        "served_model_name": f"{_VLLM}: --served-model-name",
        "dtype": f"{_VLLM}: --dtype",
        "num_blocks": f"{_VLLM}: --kv-cache-memory-bytes",
        "block_tokens": f"{_VLLM}: --block-size",
        "max_rows": f"{_VLLM}: --max-num-seqs",
        "max_requests": "blocks bound the requests that wait",
        "max_tokens": f"{_VLLM}: --max-model-len",
        "num_threads": "both phases use the cores of the process; run it under taskset for fewer",
        "partition": "the profile decides whether cores are partitioned; `decode_share` fixes the partition",
        "open_wait_seconds": "engines give up a silent agent after 2 s",
        "reuse_min_tokens": "the connector's default, 256 tokens",
        "dwell_steps": "16 steps",
    }

    model: Path | None = setting("path", default=None, doc="Model folder, or its name at a hub, as vLLM takes it.")
    listen: str = setting("address", default="127.0.0.1:8200", doc="HTTP: vLLM's OpenAI-compatible server.")
    insecure_plaintext: bool = setting(
        "flag", default=False, doc="Unencrypted listener beyond loopback, open to everybody."
    )
    profile: Path | None = setting(
        "path", default=None, doc="Colocation profile (YAML). Empty: half of the cores for each phase while both run."
    )
    itl_slo_seconds: float = setting(
        "seconds", default=0.05, minimum=1e-4, only_where={"profile": GIVEN}, doc="Longest decode step."
    )
    decode_share: float = setting(
        "ratio", default=0.0, maximum=0.99, doc="Fixed share of the cores for decode; 0 adapts to the traffic."
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
    tls: TlsConfig = setting(record(TlsConfig), formerly=("tls_*",), doc=TLS_DOC)

    def __post_init__(self) -> None:
        check_tls(self)
        check_consent(self, "listen")
        if self.agent_socket is not None:
            check_socket_path("agent_socket", self.agent_socket)
