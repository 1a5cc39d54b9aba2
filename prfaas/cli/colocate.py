"""`prfaas-colocate`: prefill and decode at the same time on one device. `serve` answers requests, `profile` measures shares."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence

from prfaas import config, logs
from prfaas.cli import startup
from prfaas.cli.component import check_named_files
from prfaas.colocate.config import ColocateConfig
from prfaas.errors import AgentUnreachable, ConfigError, LayoutError, MissingExtraError

USAGE = """usage: prfaas-colocate {serve,profile} [--config FILE] [--KEY VALUE ...]

  serve    answer requests over HTTP until SIGTERM or SIGINT
  profile  measure decode and prefill on shares of the device, and write that to --profile FILE

prfaas-colocate serve --help lists every setting.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT, or write a profile; 2 when the configuration is wrong or the extra is missing."""
    command, *arguments = [*(sys.argv[1:] if argv is None else argv), ""][:-1] or [""]
    if command not in ("serve", "profile"):
        asked = command in ("-h", "--help")
        (sys.stdout if asked else sys.stderr).write(USAGE)
        return 0 if asked else 2
    check = check_named_files if command == "serve" else _check_profile
    settings = config.parse(ColocateConfig, component="colocate", argv=arguments, doc=__doc__ or "", check=check)
    logs.setup("colocate")
    try:
        if command == "profile":
            startup.load_extra("prfaas.colocate.profile.measure", extra="colocate").write_profile(
                settings, settings.profile
            )
            return 0
        server = startup.load_extra("prfaas.colocate.server", extra="colocate")
        startup.serve(lambda: server.serve(settings))
    except (AgentUnreachable, ConfigError, LayoutError, MissingExtraError, OSError) as error:
        sys.stderr.write(f"prfaas-colocate: {error}\n")
        return 2
    return 0


def _check_profile(settings: ColocateConfig) -> None:
    """Raise ConfigError where no file can be written, before minutes of measuring; one that is there stays as it is, and
    nothing is left."""
    path = settings.profile
    if path is None:
        raise ConfigError("profile: the file to write, such as --profile h200.yaml")
    if path.exists() and not path.is_file():
        raise ConfigError(f"profile: {path} is something else than a file")
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise ConfigError(f"profile: {path}: {error.strerror}; name a file in a folder that can be written") from error


if __name__ == "__main__":
    sys.exit(main())
