"""Every key of `kv_connector_extra_config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prfaas.config import load_mapping, setting
from prfaas.config_checks import check_socket_path

ADMISSIONS = ("wait", "preallocate", "auto")


@dataclass(frozen=True)
class ConnectorSettings:
    """The connector inside one engine."""

    agent_socket: Path = setting("path", required=True, doc="Unix socket of this machine's prfaas-agent.")
    model: str = setting(
        "text", default="", doc="Identity of the weights in hashes and layouts; the served model name when empty."
    )
    tenant: str = setting(
        "text", default="", doc="Salt of the hashes of requests that name no tenant; equal to the routers' `tenant`."
    )
    open_wait_seconds: float = setting(
        "seconds",
        default=0.5,
        doc="How long a request may be parked for the agent's answer before it goes without. Others run meanwhile. "
        "Once a question has gone unanswered for so long, nobody waits for another one until the agent says anything.",
    )
    reuse: bool = setting(
        "flag",
        default=True,
        doc="Take up prefixes that the agent's pool holds, and leave the blocks of finished requests there.",
    )
    reuse_min_tokens: int = setting(
        "tokens", default=256, doc="Prompts and answers shorter than this are neither looked up nor left in the pool."
    )
    admission: str = setting(
        "text",
        default="wait",
        doc="When a decode request gets engine blocks: wait (once its KV is in host memory), preallocate (at once), "
        "or auto (at once while at least `plenty_ratio` of the blocks are free).",
    )
    plenty_ratio: float = setting(
        "ratio", default=0.5, doc="Share of free engine blocks that `admission: auto` takes for plenty."
    )
    receive_timeout_seconds: float = setting(
        "seconds", default=120.0, doc="How long a decode request waits for its KV before it is computed locally."
    )
    hold_wait_seconds: float = setting(
        "seconds",
        default=10.0,
        doc="How long a request waits for a prefix that the agent's pool was found to hold; more than the agent's "
        "`ssd_wait_seconds`, after which a living agent answers in any case.",
    )
    reset_wait_seconds: float = setting(
        "seconds",
        default=60.0,
        doc="How long a reset waits for the agent, which takes about 6 s for a million blocks on its SSD, 1 s in memory.",
    )
    idle_wait_seconds: float = setting(
        "seconds",
        default=0.01,
        maximum=0.1,
        doc="How long an otherwise idle engine sleeps at most between two looks at a transfer that has not come. "
        "Its coming ends the sleep; a new request waits for the next look. It does not sleep under data parallelism with "
        "experts, where all ranks step together.",
    )

    def __post_init__(self) -> None:
        check_socket_path("agent_socket", self.agent_socket)
        if self.admission not in ADMISSIONS:
            raise ValueError(f"admission: {self.admission!r}; write {', '.join(ADMISSIONS)}")


def read(extra_config: Mapping[str, Any]) -> ConnectorSettings:
    """The settings in `kv_connector_extra_config`.

    Raises:
        ConfigError: a key is unknown or missing, or a value malformed or out of range; it names the key.
    """
    return load_mapping(ConnectorSettings, extra_config, where="kv_connector_extra_config")
