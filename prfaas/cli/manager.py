"""`prfaas-manager`: one or more per deployment. Keeps the index of cached prefixes and routes requests."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from prfaas import config, grants, logs
from prfaas.cli import named_files, startup
from prfaas.errors import ConfigError, MissingExtraError
from prfaas.manager.config import ManagerConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT. Return 2 when the configuration is wrong."""
    arguments = sys.argv[1:] if argv is None else argv
    settings = config.parse(
        ManagerConfig, component="manager", argv=arguments, doc=__doc__ or "", check=named_files.check
    )
    logs.setup("manager")
    try:
        daemon = startup.load_extra("prfaas.manager.daemon", extra="manager")
        secret = grants.read_secret(settings.secret_file)
        startup.send_spans("manager", settings.traces_endpoint, instance=settings.name)
        startup.serve(lambda: daemon.Manager(settings, secret).run())
    except (ConfigError, MissingExtraError) as error:
        sys.stderr.write(f"prfaas-manager: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
