"""`prfaas-agent`: one per machine that runs engines. Owns the pool and all KV transfers."""

import sys
from collections.abc import Sequence

from prfaas import grants
from prfaas.agent.config import AgentConfig
from prfaas.agent.daemon import Agent
from prfaas.cli import component, startup


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT. Return 2 when the configuration is wrong or an extra is missing."""
    return component.run("agent", AgentConfig, argv, doc=__doc__, start=_serve)


def _serve(settings: AgentConfig) -> None:
    secret = grants.read_secret(settings.secret_file)
    report = startup.load_extra("prfaas.agent.report", extra="site").NodeReporter if settings.managers else None
    startup.send_spans("agent", settings.traces_endpoint, instance=settings.name)
    startup.serve(lambda: Agent(settings, secret, report=report).run())


if __name__ == "__main__":
    sys.exit(main())
