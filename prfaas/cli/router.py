"""`prfaas-router`: the OpenAI-compatible HTTP server of a PD cluster."""

import sys
from collections.abc import Sequence
from pathlib import Path

from prfaas import grants
from prfaas.cli import component, startup
from prfaas.router.config import RouterConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT. Return 2 when the configuration is wrong or an extra is missing."""
    return component.run("router", RouterConfig, argv, doc=__doc__, start=_serve)


def _serve(settings: RouterConfig) -> None:
    server = startup.load_extra("prfaas.router.server", extra="site")
    secret = grants.read_secret(Path(settings.secret_file))
    gateways = startup.load_extra("prfaas.router.ext_proc.server", extra="site") if settings.ext_proc_listen else None
    picker = gateways.open_picker if gateways else None
    startup.send_spans("router", settings.traces_endpoint, instance=settings.listen)
    startup.serve(lambda: server.serve(settings, secret, picker=picker))


if __name__ == "__main__":
    sys.exit(main())
