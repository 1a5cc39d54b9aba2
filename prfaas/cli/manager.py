"""`prfaas-manager`: one or more per deployment. Keeps the index of cached prefixes and routes requests."""

import sys
from collections.abc import Sequence

from prfaas import grants
from prfaas.cli import component, startup
from prfaas.manager.config import ManagerConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT. Return 2 when the configuration is wrong or an extra is missing."""
    return component.run("manager", ManagerConfig, argv, doc=__doc__, start=_serve)


def _serve(settings: ManagerConfig) -> None:
    daemon = startup.load_extra("prfaas.manager.daemon", extra="site")
    secret = grants.read_secret(settings.secret_file)
    startup.send_spans("manager", settings.traces_endpoint, instance=settings.name)
    startup.serve(lambda: daemon.Manager(settings, secret).run())


if __name__ == "__main__":
    sys.exit(main())
