"""Dynamo's offline replay (`pip install ai-dynamo-runtime`, in an interpreter of its own): a public simulator as the peer."""

from __future__ import annotations

import json
import os
import subprocess

_SCRIPT = """
import json, sys, time
import dynamo._core as core
count = int(sys.argv[1])
core.run_mocker_synthetic_trace_replay(2048, 128, 200, num_workers=4, request_rate=20.0)
started = time.process_time()
core.run_mocker_synthetic_trace_replay(2048, 128, count, num_workers=4, request_rate=20.0)
print(json.dumps(time.process_time() - started))
"""


def dynamo_requests_per_second(count: int) -> float | None:
    """Simulated requests per CPU second; None where DYNAMO_PYTHON names no interpreter that has it."""
    interpreter = os.environ.get("DYNAMO_PYTHON")
    if not interpreter:
        return None
    ran = subprocess.run([interpreter, "-c", _SCRIPT, str(count)], check=True, capture_output=True, text=True)
    return count / float(json.loads(ran.stdout.splitlines()[-1]))
