"""A profile that `prfaas-colocate profile` measures is one that planner, twin and partition manager read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from prfaas.solve.files.profile_file import read_colocation
from tests.integration.colocate.instance import FLAGS, KV_BYTES
from tools.stack import EAGER_ENVIRONMENT, ENGINE_ENVIRONMENT
from tools.tiny_models import make_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.mark.timeout(1200)
def test_the_command_measures_every_share_of_the_cores(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    if cores < 2:
        pytest.skip("one core cannot be shared")
    file = tmp_path / "tiny.yaml"
    command = [str(Path(sys.executable).parent / "prfaas-colocate"), "profile"]
    command += ["--model", str(make_model("gemma3", tmp_path / "gemma3")), "--profile", str(file), "--", *FLAGS]
    command += ["--kv-cache-memory-bytes", str(KV_BYTES)]
    subprocess.run(command, check=True, env=os.environ | ENGINE_ENVIRONMENT | EAGER_ENVIRONMENT)
    colocation = read_colocation(file)
    assert min(colocation.decode.shares) > 0 and max(colocation.decode.shares) < 1
    assert all(0 < seconds < 10 for row in colocation.decode.seconds for seconds in row)
    assert {item.share for item in colocation.prefill} >= {1 - share for share in colocation.decode.shares}
