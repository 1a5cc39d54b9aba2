"""`prfaas-router`: the OpenAI-compatible HTTP server of a PD cluster."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from prfaas import config, grants, logs
from prfaas.cli import named_files, startup
from prfaas.errors import ConfigError, MissingExtraError
from prfaas.router.config import RouterConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; 2 when the configuration is wrong or the extra is missing."""
    arguments = sys.argv[1:] if argv is None else argv
    settings = config.parse(
        RouterConfig, component="router", argv=arguments, doc=__doc__ or "", check=named_files.check
    )
    logs.setup("router")
    try:
        server = startup.load_extra("prfaas.router.server", extra="router")
        secret = grants.read_secret(Path(settings.secret_file))
        gateways = (
            startup.load_extra("prfaas.router.ext_proc.server", extra="gateway") if settings.ext_proc_listen else None
        )
        picker = gateways.open_picker if gateways else None
        startup.send_spans("router", settings.traces_endpoint, instance=settings.listen)
        startup.serve(lambda: server.serve(settings, secret, picker=picker))
    except (ConfigError, MissingExtraError) as error:
        sys.stderr.write(f"prfaas-router: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
