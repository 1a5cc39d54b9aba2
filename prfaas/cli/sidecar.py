"""`prfaas-sidecar`: runs on the host of a decode engine, behind a gateway that names the prefill engine in a header."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from prfaas import config, logs
from prfaas.cli import named_files, startup
from prfaas.errors import ConfigError, MissingExtraError
from prfaas.router.sidecar.config import SidecarConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; 2 when the configuration is wrong or the extra is missing."""
    arguments = sys.argv[1:] if argv is None else argv
    settings = config.parse(
        SidecarConfig, component="sidecar", argv=arguments, doc=__doc__ or "", check=named_files.check
    )
    logs.setup("sidecar")
    try:
        server = startup.load_extra("prfaas.router.sidecar.server", extra="router")
        startup.serve(lambda: server.serve(settings))
    except (ConfigError, MissingExtraError) as error:
        sys.stderr.write(f"prfaas-sidecar: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
