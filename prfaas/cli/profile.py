"""`prfaas-profile`: measure a running vLLM endpoint and write the profile that `prfaas-solve` reads."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

import prfaas
from prfaas.cli.arguments import OneLineParser, list_of, run, value_of
from prfaas.solve import endpoint_profile


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write. Return 2 if the endpoint or a flag cannot be used."""
    flags = _parser().parse_args(argv)
    return run("prfaas-profile", lambda: _write_profile(flags))


def _write_profile(flags: argparse.Namespace) -> int:
    text = yaml.safe_dump(_measure(flags), sort_keys=False, allow_unicode=True)
    if flags.output is None:
        print(text, end="")
    else:
        flags.output.write_text(text, encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="prfaas-profile", description=__doc__)
    parser.add_argument("--version", action="version", version=f"%(prog)s {prfaas.__version__}")
    parser.add_argument("--endpoint", required=True, metavar="URL", help="http://host:port of the engine")
    parser.add_argument("--model", required=True, help="the engine's served model name")
    parser.add_argument("--name", required=True, help="name of the profile")
    parser.add_argument("--hardware", required=True, help="kind of GPU")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs of this instance")
    lengths, counts = list_of(value_of("tokens", least=1)), list_of(value_of("count", least=1))
    parser.add_argument("--lengths", type=lengths, default="1K,2K,4K,8K,16K,32K", help="prompts to prefill")
    parser.add_argument("--append", type=lengths, default="512,2K", help="new tokens behind a cached prefix")
    parser.add_argument("--cached", type=lengths, help="cached prefixes to append to; default: none")
    parser.add_argument("--batches", type=counts, default="1,2,4,8,16,32", help="decode batches")
    parser.add_argument("--contexts", type=lengths, default="1K,4K", help="tokens that each decoding request holds")
    parser.add_argument("--decode-tokens", type=int, default=64, help="tokens that each request decodes")
    parser.add_argument(
        "--repeats", type=value_of("count", least=1), default=3, help="prompts per length; the median is written"
    )
    parser.add_argument("--vocabulary", type=int, default=10_000, help="token ids are drawn below this")
    parser.add_argument("--fit", choices=("quadratic", "interpolate"), default="quadratic", help="curve for prefill")
    parser.add_argument("--output", type=Path, metavar="FILE", help="file to write; default: standard output")
    return parser


def _measure(flags: argparse.Namespace) -> dict[str, Any]:
    endpoint = endpoint_profile.EngineEndpoint(flags.endpoint, model=flags.model, vocabulary=flags.vocabulary)
    prefill = endpoint_profile.measure_prefill(endpoint, flags.lengths, repeats=flags.repeats)
    if flags.cached:
        prefill += endpoint_profile.measure_appends(endpoint, flags.append, flags.cached, repeats=flags.repeats)
    steps = endpoint_profile.measure_decode(endpoint, flags.batches, flags.contexts, num_tokens=flags.decode_tokens)
    return {
        "name": flags.name,
        "hardware": flags.hardware,
        "gpus_per_instance": flags.gpus,
        "model": flags.model,
        "source": f"prfaas-profile {prfaas.__version__}, median of {flags.repeats}, batch 1 for prefill",
        "prefill": {
            "fit": flags.fit,
            "points": [
                {"tokens": point.tokens, "cached": point.cached, "seconds": round(point.seconds, 6)}
                for point in prefill
            ],
        },
        "decode": {
            "points": [
                {"batch": point.batch, "context": point.context, "step": round(point.step, 6)} for point in steps
            ]
        },
    }


if __name__ == "__main__":
    sys.exit(main())
