"""`prfaas-agent`: one per machine that runs engines. Owns the pool and all KV transfers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from prfaas import config, grants, logs
from prfaas.agent.config import AgentConfig
from prfaas.agent.daemon import Agent
from prfaas.cli import named_files, startup
from prfaas.errors import ConfigError, MissingExtraError


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT. Return 2 when the configuration is wrong."""
    arguments = sys.argv[1:] if argv is None else argv
    settings = config.parse(AgentConfig, component="agent", argv=arguments, doc=__doc__ or "", check=named_files.check)
    logs.setup("agent")
    try:
        secret = grants.read_secret(Path(settings.secret_file))
        report = startup.load_extra("prfaas.agent.report", extra="manager").NodeReporter if settings.managers else None
        startup.send_spans("agent", settings.traces_endpoint, instance=settings.name)
        startup.serve(lambda: Agent(settings, secret, report=report).run())
    except (ConfigError, MissingExtraError) as error:
        sys.stderr.write(f"prfaas-agent: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
