"""Cases of llm-d (tests/data/llmd-conformance.json): those that prfaas answers, and those that it refuses by name."""

import functools
import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

Case = dict[str, Any]
Test = TypeVar("Test", bound=Callable[..., Any])
DATA = Path(__file__).parents[3] / "data"
_FILE = json.loads((DATA / "llmd-conformance.json").read_text())
CASES: list[Case] = _FILE["cases"]
PODS: dict[str, dict[str, str]] = _FILE["pods"]
_checked: set[int] = set()  # Identities of cases.
# Groups, or single cases, whose configuration names something that a file or a setting of prfaas cannot have.
REFUSED: dict[str | tuple[str, str], str] = {
    "config-loader.section": "section",
    "context-length-aware": "plugin",
    "context-length-aware.range": "plugin",
    "scorer.lora-affinity-scorer": "plugin",
    "scorer.session-affinity-scorer": "plugin",
    "filter.session-affinity": "plugin",
    "pickers": "plugin",
    ("role-filters", "encode-filter"): "plugin",
    ("prefix-cache-affinity-filter", "explorationProbability 1"): "parameter",
    ("disagg-profile-handler.config", "encode profile"): "parameter",
    ("disagg-profile-handler.config", "encode decider"): "parameter",
    ("disagg-profile-handler.config", "stageOrder prefill-first"): "parameter",
    "sidecar.other-connectors": "sidecar",
    "sidecar.moriio": "sidecar",
    ("sidecar.prefill-header", "sampling, comma"): "sidecar",
    ("sidecar.prefill-header", "sampling, two headers"): "sidecar",
    **{
        ("sidecar.nixlv2", f"prefill answers {answers} retries allowed{rest}"): "sidecar"
        for answers, rest in (
            ("502 once, 2", ""),
            ("503 once, 2", ""),
            ("504 once, 2", ""),
            ("500 once, 2", ""),
            ("502, 2", ", 100 failures"),
            ("502, 0", ", 1 failures"),
        )
    },
    **{
        ("sidecar.encode", case): "sidecar"
        for case in ("encoder and prefill", "encoder allowed", "one encoder denied", "two encoders allowed")
    },
}
# Cases without a counterpart in a configuration.
DIFFERENT: dict[str | tuple[str, str], str] = {
    "input-length": "the engine's tokenizer counts prompts",
    "approx-prefix-cache-producer": "the index is exact; the plugin's parameters give a warning by name",
    "sidecar.generate": "the decode engine prefills requests to this path",
    ("prefix-based-pd-decider", "no endpoint"): "the decider runs after the choice of a decode endpoint",
    ("prefix-cache-affinity-filter", "latency predictor breaks affinity"): "no predictor: a warning by name",
    ("profile", "all endpoints filtered out"): "the router answers 503",
    ("routing-headers", "two encoders"): "no encode stage",
}


def _is_among(case: Case, listed: dict[Any, str]) -> bool:
    return case["group"] in listed or (case["group"], case["id"]) in listed


def cases(*groups: str) -> Callable[[Test], Test]:
    """Parametrise a test over the cases of some groups that prfaas answers. It fails for a case that it does not `check`."""
    chosen = [case for case in answered() if case["group"] in groups]
    assert {case["group"] for case in chosen} == set(groups)

    def decorate(test: Test) -> Test:
        if inspect.iscoroutinefunction(test):

            @functools.wraps(test)
            async def run(*args: Any, case: Case, **fixtures: Any) -> None:
                await test(*args, case=case, **fixtures)
                assert id(case) in _checked

        else:

            @functools.wraps(test)
            def run(*args: Any, case: Case, **fixtures: Any) -> None:
                test(*args, case=case, **fixtures)
                assert id(case) in _checked

        parametrised: Test = _parametrised(chosen)(run)
        return parametrised

    return decorate


def refused_cases(*ways: str) -> pytest.MarkDecorator:
    """Return a parametrisation over the cases that prfaas refuses in some ways."""
    found = [case for case in CASES if _is_among(case, REFUSED)]
    return _parametrised([case for case in found if refused_way(case) in ways])


def refused_way(case: Case) -> str:
    return REFUSED.get(case["group"]) or REFUSED[case["group"], case["id"]]


def answered() -> list[Case]:
    return [case for case in CASES if not _is_among(case, REFUSED) and not _is_among(case, DIFFERENT)]


def different() -> list[Case]:
    return [case for case in CASES if _is_among(case, DIFFERENT)]


def _parametrised(chosen: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", chosen, ids=[f"{case['group']}: {case['id']}" for case in chosen])


def check(case: Case, observed: dict[str, Any]) -> None:
    """Compare a result with the expected one, and with every changed expectation, which must differ.

    `observed` comes from the case's input alone. Its further keys do not count.
    """
    _checked.add(id(case))
    expected = case["expect"]
    result = {name: observed[name] for name in expected if name in observed}
    assert _agree(result, expected), f"{result} in place of {expected}"
    for changed in _mutations(expected):
        assert not _agree(result, changed), f"the case would accept {changed} too"


def _agree(observed: Any, expected: Any) -> bool:
    match expected:
        case dict():
            return (
                isinstance(observed, dict)
                and observed.keys() == expected.keys()
                and all(
                    value in observed[name] if name == "error" else _agree(observed[name], value)
                    for name, value in expected.items()
                )
            )
        case list():
            return (
                isinstance(observed, list) and len(observed) == len(expected) and all(map(_agree, observed, expected))
            )
        case bool() | None | str():
            return type(observed) is type(expected) and bool(observed == expected)
        case _:
            return not isinstance(observed, bool | str | None) and bool(observed == pytest.approx(expected, abs=1e-3))


def _mutations(expected: Any) -> Iterator[Any]:
    """Yield copies of an expectation with one value changed, and lists without an element or with one more."""
    match expected:
        case dict():
            for name, value in expected.items():
                yield from ({**expected, name: changed} for changed in _mutations(value))
        case list():
            yield [*expected, "another"]
            for position, value in enumerate(expected):
                yield expected[:position] + expected[position + 1 :]
                for changed in _mutations(value):
                    yield [*expected[:position], changed, *expected[position + 1 :]]
        case bool():
            yield not expected
        case str():
            yield f"{expected}~"
        case None:
            yield "something"
        case _:
            yield expected + 0.25
