"""Every setting of `prfaas-router`."""

from __future__ import annotations

from dataclasses import dataclass

from prfaas.config import records, setting


@dataclass(frozen=True)
class InstanceConfig:
    """One vLLM server and the agent beside it."""

    name: str = setting("text", required=True, doc="Name of the instance, unique in the deployment.")
    url: str = setting("text", required=True, doc="Base URL of its OpenAI server, such as http://10.0.0.5:8000.")
    role: str = setting("text", required=True, doc="What it does: prefill, decode or both.")
    agent: str = setting("text", required=True, doc="Name of the agent on its machine.")
    wire: str = setting("address", required=True, doc="Where other agents reach that agent's wire.")

    def __post_init__(self) -> None:
        if self.role not in ("prefill", "decode", "both"):
            raise ValueError(f"role: {self.role!r}; write prefill, decode or both")
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url: {self.url!r}; write http://host:port")


@dataclass(frozen=True)
class ClusterConfig:
    """Homogeneous machines on one fast network."""

    name: str = setting("text", required=True, doc="Name of the cluster.")
    kind: str = setting("text", required=True, doc="prfaas (prefill for others) or pd (prefill and decode).")
    instances: tuple[InstanceConfig, ...] = setting(records(InstanceConfig), default=(), doc="Its engines.")

    def __post_init__(self) -> None:
        if self.kind not in ("prfaas", "pd"):
            raise ValueError(f"kind: {self.kind!r}; write prfaas or pd")


@dataclass(frozen=True)
class RouterConfig:
    """One front door."""

    listen: str = setting("address", default="127.0.0.1:8000", doc="Where clients connect.")
    secret_file: str = setting("path", required=True, doc="File with the deployment's secret, at least 32 bytes.")
    clusters: tuple[ClusterConfig, ...] = setting(
        records(ClusterConfig), default=(), doc="The clusters, where no manager tells them."
    )
    managers: tuple[str, ...] = setting(
        "text_list", default=(), doc="Managers (host:port) that know the instances, what is cached where, and decide."
    )
    cluster: str = setting("text", default="", doc="This router's PD cluster; empty: any may decode.")
    manager_timeout: float = setting(
        "seconds", default=0.25, doc="How long a decision may take before the router decides without the manager."
    )
    threshold_tokens: int = setting(
        "tokens",
        default=16_000,
        doc="t: prompts with more uncached tokens are prefilled by a PrfaaS cluster. A manager's own t counts before it.",
    )
    max_transfer_bytes: int = setting("bytes", default=64 << 30, doc="Most KV that one transfer may bring.")
    max_body_bytes: int = setting("bytes", default=32 << 20, doc="Largest request body.")
    transfer_deadline: float = setting(
        "seconds", default=120.0, doc="When a transfer that has not arrived is given up."
    )
    request_timeout: float = setting("seconds", default=600.0, doc="When an answer that has not ended is given up.")
    probe_interval: float = setting("seconds", default=2.0, doc="How often engines are asked for their health.")
    tenant: str = setting("text", default="", doc="Salt of every prefix hash; equal in every engine's connector.")

    def __post_init__(self) -> None:
        names = [instance.name for cluster in self.clusters for instance in cluster.instances]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"clusters: instance {twice[0]} is named twice")
        if not self.managers and not any(cluster.kind == "pd" and cluster.instances for cluster in self.clusters):
            raise ValueError("clusters: no pd cluster with an instance, and no managers; nobody could decode")
