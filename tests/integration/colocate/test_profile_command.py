"""A profile that `prfaas-colocate profile` measures is one that planner, twin and partition manager read."""

import os
import subprocess
from pathlib import Path

import pytest

from prfaas.config import load_file
from prfaas.solve.files.profile_file import ProfileFile, read_colocation, read_profile
from tests.integration.colocate.instance import FLAGS, KV_BYTES
from tools.stack import EAGER_ENVIRONMENT, ENGINE_ENVIRONMENT, script
from tools.tiny_models import make_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.soak]


@pytest.mark.timeout(1200)
def test_the_command_measures_every_share_of_the_cores(tmp_path: Path) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core cannot be shared")
    file = tmp_path / "tiny.yaml"
    command = [script("prfaas-colocate"), "profile", "--model", str(make_model("gemma3", tmp_path / "gemma3"))]
    command += ["--profile", str(file), "--", *FLAGS, "--kv-cache-memory-bytes", str(KV_BYTES)]
    subprocess.run(command, check=True, env=os.environ | ENGINE_ENVIRONMENT | EAGER_ENVIRONMENT)
    measured, table, sharing = (
        load_file(ProfileFile, file).colocation,
        read_colocation(file),
        read_profile(file).sharing,
    )
    assert all(0 < seconds < 10 for row in table.seconds for seconds in row)
    assert {item.share for item in measured.prefill} == {1.0, *(round(1 - share, 4) for share in table.shares)}
    assert sharing is not None and sharing.frontier.at(1)[0] == (0.0, 1.0)
