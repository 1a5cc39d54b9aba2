"""Shared test setup: skips for missing hardware, time budgets per folder, and second tries."""

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

# gRPC reads this when it is imported. Its fork handlers run in children before exec and sometimes end them
# ("epoll_wait error: Bad file descriptor"). No child process uses gRPC before its exec.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

# The time of one example depends on other work of the machine; `timeout` bounds the whole test.
# Each run draws the same examples, so that failures are reproducible. `make soak` draws many new ones.
hypothesis.settings.register_profile("seeded", deadline=None, derandomize=True)
hypothesis.settings.register_profile("soak", deadline=None, max_examples=2000)
hypothesis.settings.load_profile("seeded")

# Seconds for all tests of a folder on 2 cores that are also used by other work. An idle machine needs about a third.
# The summary names a folder above its budget. It fails no run, since a slow machine must reject nothing.
BUDGET_SECONDS = {"unit": 600, "property": 240, "integration": 1300, "e2e": 900, "conformance": 240, "soak": 240}
WITH_ENGINES = frozenset(("conformance", "e2e"))

# A test with processes and sockets may lose a race on a busy machine. It gets a second try and is named at the end.
# More than a few second tries in one run fail the run.
WITH_PROCESSES = WITH_ENGINES | {"integration", "soak"}
MAX_SECOND_TRIES = 5

_spent_seconds: dict[str, float] = defaultdict(float)
_second_tries: list[pytest.TestReport] = []


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
def _restored_loggers() -> Iterator[None]:
    """Restore the loggers. A command that ran in this process has redirected them to the test's standard error."""
    loggers = [logging.getLogger(name) for name in ("", "prfaas")]
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagates) in zip(loggers, before, strict=True):
        logger.handlers[:], logger.propagate = handlers, propagates
        logger.setLevel(level)


class _Scheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Scheduling in which one worker runs all tests with real engines, since these need the processor."""

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
        _second_tries.append(report)


def _largest(terminalreporter: pytest.TerminalReporter) -> dict[str, float]:
    """Return the largest value of each recorded property whose name begins with "largest"."""
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
    for report in _second_tries:
        terminalreporter.write_line(f"SECOND TRY {report.nodeid}", yellow=True)
        terminalreporter.write_line(report.longreprtext)
    if len(_second_tries) > MAX_SECOND_TRIES:
        terminalreporter.write_line(f"more than {MAX_SECOND_TRIES} tests needed a second try", red=True)
    for line in _over_budget() if _is_budgeted(config) else []:
        terminalreporter.write_line(f"OVER BUDGET {line} (tests/conftest.py states the budgets)", yellow=True)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus == pytest.ExitCode.OK and len(_second_tries) > MAX_SECOND_TRIES:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _is_budgeted(config: pytest.Config) -> bool:
    """Return whether time budgets apply. Soak runs have none, and an xdist worker sees only a part of the tests."""
    is_soak = "not soak" not in config.getoption("markexpr") or config.getoption("--hypothesis-profile") == "soak"
    return not is_soak and not hasattr(config, "workerinput")
