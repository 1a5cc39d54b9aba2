"""`prfaas-profile`: measure a running vLLM endpoint and write the profile that `prfaas-solve` reads."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

import prfaas
from prfaas.cli import startup
from prfaas.cli.arguments import OneLineParser, list_of, run, show_progress, value_of
from prfaas.errors import ConfigError
from prfaas.solve import endpoint_profile
from prfaas.solve.endpoint_profile import EngineEndpoint, Measurements, Point


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write. Return 2 if the endpoint or a flag cannot be used."""
    flags = _parser().parse_args(argv)
    return run("prfaas-profile", lambda: _write_profile(flags))


def _write_profile(flags: argparse.Namespace) -> int:
    """Measure each point that is not kept from an earlier run, and write what could be measured."""
    partial = flags.output and flags.output.with_suffix(".partial.json")
    results = endpoint_profile.Measurements(partial, {"endpoint": flags.endpoint, "model": flags.model})
    endpoint = EngineEndpoint(flags.endpoint, model=flags.model, vocabulary=flags.vocabulary)
    kv_memory = _kv_memory(flags, endpoint)
    failed = _measure(flags, endpoint, results)
    if "model" not in kv_memory:
        _report(f"kv_memory is unknown: the catalog has no model {flags.model!r}; name it by --config")
    elif "kv_memory" not in kv_memory:
        _report("kv_memory is unknown: the engine's /metrics do not state it; write it into the profile")
    text = yaml.safe_dump(_profile(flags, results, failed) | kv_memory, sort_keys=False, allow_unicode=True)
    if flags.output is None:
        print(text, end="")
    else:
        flags.output.write_text(text, encoding="utf-8")
    if not failed:
        results.close()
        return 0
    _report(f"{len(failed)} points failed; run again to measure them")
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="prfaas-profile", description=__doc__)
    parser.add_argument("--version", action="version", version=f"%(prog)s {prfaas.__version__}")
    parser.add_argument("--endpoint", required=True, metavar="URL", help="http://host:port of the engine")
    parser.add_argument("--model", required=True, help="the engine's served model name")
    parser.add_argument(
        "--config", metavar="NAME|CONFIG", help="catalogued model or config.json, for its KV memory; default: --model"
    )
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
        "--repeats",
        type=value_of("count", least=3),
        default=12,
        help="most prompts per length; fewer if their mean is exact",
    )
    parser.add_argument("--vocabulary", type=int, default=10_000, help="token ids are drawn below this")
    parser.add_argument("--output", type=Path, metavar="FILE", help="file to write; default: standard output")
    return parser


def _points(flags: argparse.Namespace) -> list[Point]:
    """Return all points in the order in which they are measured."""
    points = [Point(length) for length in flags.lengths]
    points += [Point(length, cached) for cached in flags.cached or () for length in flags.append]
    return points + [Point(context, batch=batch) for context in flags.contexts for batch in flags.batches]


def _kv_memory(flags: argparse.Namespace, endpoint: EngineEndpoint) -> dict[str, Any]:
    """Return the model's catalogued name, and the bytes of KV that the engine holds, as far as they are known."""
    catalog, capacity = startup.load_extra("prfaas.solve.files.catalog", extra="site"), endpoint.kv_capacity()
    is_fp8 = capacity is not None and capacity.dtype.startswith("fp8")
    try:
        model = catalog.find_model(flags.config or flags.model, kv_dtype="fp8" if is_fp8 else "auto")
    except ConfigError:
        if flags.config:
            raise
        return {}
    if capacity is None:
        return {"model": model.name}
    return {"model": model.name, "kv_memory": round(capacity.num_requests * model.kv_bytes(capacity.num_tokens))}


def _report(text: str) -> None:
    sys.stderr.write(f"prfaas-profile: {text}\n")


def _measure(flags: argparse.Namespace, endpoint: EngineEndpoint, results: Measurements) -> list[str]:
    """Measure what is missing and return the failures. Raise the first failure if nothing could be measured."""
    points, failed = _points(flags), []
    # The first request of an engine compiles and warms up.
    endpoint.prefill_seconds(endpoint.prompt(min(flags.lengths)))
    for done, point in enumerate(points):
        show_progress(done, len(points), _described(point))
        if point.key in results.found:
            continue
        try:
            measured = endpoint_profile.measure_point(
                endpoint, point, results, most=flags.repeats, decode_tokens=flags.decode_tokens
            )
            results.add(point, measured)
        except ConfigError as error:
            if not results.found:
                raise
            failed.append(str(error))
            _report(f"{' '.join(str(error).split())}; left out")
    show_progress(len(points), len(points))
    return failed


def _described(point: Point) -> str:
    kind = f"decode, batch {point.batch}" if point.batch else "prefill"
    return f"{kind}, {point.tokens} tokens"


def _profile(flags: argparse.Namespace, results: Measurements, failed: Sequence[str]) -> dict[str, Any]:
    found = [(point, results.found[point.key]) for point in _points(flags) if point.key in results.found]
    worst = max((measured.error / measured.seconds for _, measured in found), default=0.0)
    source = f"prfaas-profile {prfaas.__version__}, standard errors of at most {worst:.1%}, batch 1 for prefill"
    return {
        "name": flags.name,
        "hardware": flags.hardware,
        "gpus_per_instance": flags.gpus,
        "model": flags.model,
        "source": f"{source}, {len(failed)} points failed" if failed else source,
        "prefill": {
            "fit": "weighted",
            "points": [
                {"tokens": point.tokens, "cached": point.cached, "seconds": round(measured.seconds, 6)}
                for point, measured in found
                if not point.batch
            ],
        },
        "decode": {
            "points": [
                {"batch": point.batch, "context": point.tokens, "step": round(measured.seconds, 6)}
                for point, measured in found
                if point.batch
            ]
        },
    }


if __name__ == "__main__":
    sys.exit(main())
