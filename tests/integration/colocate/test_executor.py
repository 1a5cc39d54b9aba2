"""Calls of the decode engine to a worker that does not answer."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.vllm


def test_a_step_that_is_not_answered_in_time_fails() -> None:
    code = (
        "import os; from multiprocessing.connection import Pipe; os.environ['VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS'] = '0';"
        "from prfaas.colocate.channel import Channel; from prfaas.colocate.executor import PendingAnswer;"
        "own, worker = Pipe(); PendingAnswer(Channel(own), is_single=True).result()"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=False, timeout=150, capture_output=True, text=True)
    assert ended.returncode == 1 and "TimeoutError: the decode worker does not answer" in ended.stderr
