"""`prfaas-sidecar`: runs on the host of a decode engine, behind a gateway that names the prefill engine in a header."""

import sys
from collections.abc import Sequence

from prfaas.cli import component, startup
from prfaas.router.sidecar.config import SidecarConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT. Return 2 when the configuration is wrong or an extra is missing."""
    return component.run("sidecar", SidecarConfig, argv, doc=__doc__, start=_serve)


def _serve(settings: SidecarConfig) -> None:
    server = startup.load_extra("prfaas.router.sidecar.server", extra="site")
    startup.serve(lambda: server.serve(settings))


if __name__ == "__main__":
    sys.exit(main())
