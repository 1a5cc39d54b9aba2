"""Keys of `kv_connector_extra_config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from prfaas import local
from prfaas.config import load_mapping, setting
from prfaas.config_checks import check_socket_path

DEFAULT_STAGING_BYTES = 512 << 20
LAYERWISE_MODES = ("auto", "on", "off")


@dataclass(frozen=True)
class ConnectorSettings:
    """Settings of the connector inside one engine."""

    REMOVED_SETTINGS: ClassVar[Mapping[str, str]] = {
        "admission": "a decode request gets engine blocks once its KV is in host memory",
        "plenty_ratio": "a decode request gets engine blocks once its KV is in host memory",
        "reset_wait_seconds": "a reset waits 60 s for the agent",
        "idle_wait_seconds": "an idle engine sleeps at most 10 ms",
        "receive_timeout_seconds": "an engine computes a prompt when its KV would come later than a local prefill",
        "hold_wait_seconds": "the agent answers within 5 s, or `silence_seconds` ends the wait",
    }

    agent_socket: Path | None = setting(
        "path",
        default=None,
        doc="Unix socket of this machine's prfaas-agent; empty: /run/prfaas/agent.sock if this user may write there, "
        "else in the user's state directory.",
    )
    model: str = setting(
        "text", default="", doc="Identity of the weights in hashes and layouts; the served model name if empty."
    )
    tenant: str = setting(
        "text", default="", doc="Salt of requests that name no tenant; must equal the routers' `tenant`."
    )
    silence_seconds: float = setting(
        "seconds",
        default=2.0,
        formerly=("open_wait_seconds",),
        doc="Longest time without an answer of the agent. Then requests stop waiting for it, until it answers again.",
    )
    reuse: bool = setting(
        "flag", default=True, doc="Load prefixes from the agent's pool, and store finished requests there."
    )
    reuse_min_tokens: int = setting(
        "tokens", default=256, doc="Shorter prompts and answers are neither looked up nor stored."
    )
    staging_bytes: int = setting(
        "bytes",
        default=DEFAULT_STAGING_BYTES,
        doc="GPU memory of each rank for copies of recurrent states that the next step overwrites, which is so without "
        "prefix caching. A state beyond it is not sent or stored.",
    )
    layerwise: str = setting(
        "text",
        default="auto",
        doc="Whether the KV of a prefill leaves layer by layer: auto (wherever vLLM reports layers), on (vLLM must report "
        "them, which rules out full CUDA graphs), or off (after each step).",
    )
    draft_kv: bool = setting(
        "flag",
        default=True,
        doc="Store and transfer the KV of draft layers. False on a decode side whose prefill side has no drafts, or "
        "others: fewer drafts are accepted then.",
    )
    accept_untested_vllm: bool = setting(
        "flag",
        default=False,
        doc="Start with a release of vLLM, or with options of it, that this connector does not know.",
    )
    assume_plain_attention: bool = setting(
        "flag",
        default=False,
        doc="Take every attention backend for one that stores the key and then the value of a head and token. If one side's "
        "does not, answers are wrong, and nothing notices it.",
    )

    def __post_init__(self) -> None:
        if self.agent_socket is not None:
            check_socket_path("agent_socket", self.agent_socket)
        if self.layerwise not in LAYERWISE_MODES:
            raise ValueError(f"layerwise: {self.layerwise!r}; write {', '.join(LAYERWISE_MODES)}")


def read(extra_config: Mapping[str, Any]) -> ConnectorSettings:
    """Return the settings in `kv_connector_extra_config`, with the agent's socket.

    Raises:
        ConfigError: A key is unknown or missing, or a value is malformed or out of range. The message names the key.
    """
    settings = load_mapping(ConnectorSettings, extra_config, where="kv_connector_extra_config")
    return settings if settings.agent_socket else replace(settings, agent_socket=local.agent_socket())
