"""What all tests share: which of them can run here, how long each package's may take, which get a second try."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

# gRPC looks at this when it is imported. Its handlers of forks run in children that are about to become other programs,
# and end them now and then ("epoll_wait error: Bad file descriptor"); no child of ours uses gRPC before its exec.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

# An example's time says more of the machine's other work than of the code; `timeout` bounds the whole test. The same
# examples in every run, so that a change breaks what it breaks; `make soak` draws new ones, and many.
hypothesis.settings.register_profile("seeded", deadline=None, derandomize=True)
hypothesis.settings.register_profile("soak", deadline=None, max_examples=2000)
hypothesis.settings.load_profile("seeded")

# Seconds for all tests of a folder of tests/ on 2 cores that other work keeps busy too; make check as a whole has 1800.
# Those of unit take 80 s alone and have been seen to take 290 beside other work; those with processes vary as much.
BUDGET_SECONDS = {"unit": 600, "property": 240, "integration": 1300, "e2e": 1600, "conformance": 240}
WITH_ENGINES = frozenset(("conformance", "e2e"))

# Of thousands of tests with processes and sockets one may lose a race against a busy machine. It is tried once more and
# named at the end; more than a few in one run are no accident, and the run fails.
WITH_PROCESSES = WITH_ENGINES | {"integration"}
MAX_SECOND_TRIES = 3

_spent_seconds: dict[str, float] = defaultdict(float)
_tried_again: list[pytest.TestReport] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    absent = {
        "gpu": None if shutil.which("nvidia-smi") else "needs an NVIDIA GPU",
        "root": None if os.geteuid() == 0 else "needs root",
        "vllm": None if importlib.util.find_spec("vllm") else "needs vLLM",
    }
    for item in items:
        for marker, reason in absent.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
        if _folder(item.nodeid) in WITH_PROCESSES and not item.get_closest_marker("soak"):
            item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.fixture(autouse=True)
def _loggers_as_they_were() -> Iterator[None]:
    """A command or connector that ran in this process wrote its logs to this test's standard error, which is closed then."""
    loggers = [logging.getLogger(name) for name in ("", "prfaas")]
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagates) in zip(loggers, before, strict=True):
        logger.handlers[:], logger.propagate = handlers, propagates
        logger.setLevel(level)


class _Scheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Of two workers one runs all tests with real engines, which need the processor; the other one file after another."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::")[0]
        return "engines" if _folder(nodeid) in WITH_ENGINES else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return _Scheduling(config, log)


def _folder(nodeid: str) -> str:
    return Path(nodeid.split("::")[0]).parts[1]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _spent_seconds[_folder(report.nodeid)] += report.duration
    outcome: str = report.outcome
    if outcome == "rerun":
        _tried_again.append(report)


def _largest(terminalreporter: pytest.TerminalReporter) -> dict[str, float]:
    """What tests record under names that begin with "largest": over all of them, by name."""
    found: dict[str, float] = {}
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name.startswith("largest"):
                found[name] = max(value, found.get(name, value))
    return dict(sorted(found.items()))


def _over_budget() -> list[str]:
    spent = _spent_seconds.items()
    return [f"tests/{name}: {seconds:.0f} s" for name, seconds in spent if seconds > BUDGET_SECONDS.get(name, 60)]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for name, value in _largest(terminalreporter).items():
        terminalreporter.write_line(f"{name}: {value:.2g}")
    for report in _tried_again:
        terminalreporter.write_line(f"SECOND TRY {report.nodeid}", yellow=True)
        terminalreporter.write_line(report.longreprtext)
    if len(_tried_again) > MAX_SECOND_TRIES:
        terminalreporter.write_line(f"more than {MAX_SECOND_TRIES} tests needed a second try", red=True)
    for line in _over_budget() if _is_budgeted(config) else []:
        terminalreporter.write_line(f"OVER BUDGET {line} (tests/conftest.py states the budgets)", red=True)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    is_bad = len(_tried_again) > MAX_SECOND_TRIES or (_is_budgeted(session.config) and _over_budget())
    if exitstatus == pytest.ExitCode.OK and is_bad:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _is_budgeted(config: pytest.Config) -> bool:
    """Soak tests may take long; a worker sees but a part."""
    is_soak = "not soak" not in config.getoption("markexpr") or config.getoption("--hypothesis-profile") == "soak"
    return not is_soak and not hasattr(config, "workerinput")
