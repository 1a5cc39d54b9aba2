"""Every setting of `prfaas-agent`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from prfaas.config import setting


@dataclass(frozen=True)
class AgentConfig:
    """One machine's agent."""

    name: str = setting("text", required=True, doc="Name of this node, unique in the deployment; grants speak of it.")
    socket: Path = setting("path", default=Path("/run/prfaas/agent.sock"), doc="Unix socket at which engines attach.")
    listen: str = setting("address", default="127.0.0.1:7400", doc="Where other agents' KV arrives.")
    status_listen: str = setting(
        "address", default="127.0.0.1:7401", doc="HTTP: /metrics, /healthz, /transfers, /status."
    )
    secret_file: Path = setting("path", required=True, doc="File with the deployment's secret, at least 32 bytes.")
    pool_bytes: int = setting("bytes", default=4 << 30, doc="Host memory for KV, over all layouts.")
    transfer_ratio: float = setting("ratio", default=0.5, doc="Share of the pool that transfers in flight may take.")
    eviction: str = setting("text", default="lru", doc="Which prefix blocks leave first: lru, lfu or cost.")
    num_connections: int = setting("count", default=8, doc="TCP connections per peer agent.")
    congestion_control: str = setting(
        "text", default="bbr", doc="TCP congestion control; the kernel's own default where it has no such."
    )
    reconnect_seconds: float = setting(
        "seconds", default=3.0, doc="How long a transfer survives with no connection to its peer."
    )
    peers: tuple[str, ...] = setting(
        "text_list",
        default=(),
        doc="Agents (name=host:port) whose layouts must equal ours before an engine may attach.",
    )
    insecure_plaintext: bool = setting(
        "flag", default=False, doc="Listen beyond private networks with the secret alone, unencrypted."
    )
