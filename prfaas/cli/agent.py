"""`prfaas-agent`: one per machine, beside the engines; owns the pool and the wire."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from prfaas import config, grants, logs
from prfaas.agent.config import AgentConfig
from prfaas.agent.daemon import Agent
from prfaas.cli import extras
from prfaas.errors import ConfigError, MissingExtraError


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; 2 when the configuration is wrong."""
    arguments = sys.argv[1:] if argv is None else argv
    settings = config.parse(AgentConfig, component="agent", argv=arguments, doc=__doc__ or "")
    logs.setup("agent")
    try:
        secret = grants.read_secret(Path(settings.secret_file))
        report = extras.load("prfaas.agent.reporting", extra="manager").Reporting if settings.managers else None
        uvloop.run(_serve(Agent(settings, secret, report=report)))
    except (ConfigError, MissingExtraError) as error:
        sys.stderr.write(f"prfaas-agent: {error}\n")
        return 2
    return 0


async def _serve(agent: Agent) -> None:
    serving = asyncio.ensure_future(agent.run())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await serving


if __name__ == "__main__":
    sys.exit(main())
