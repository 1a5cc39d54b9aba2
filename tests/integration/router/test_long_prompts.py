"""Prompts that cannot fit the model: refused at once, before any engine sees them."""

import http.client
import json
import os
from pathlib import Path

import pytest

from tests.support.paced_engine import MODEL
from tests.support.router_process import RouterProcess, resident_bytes, running_processes

MAX_MODEL_LEN = 131_072
MODELS = {"object": "list", "data": [{"id": MODEL, "parent": None, "max_model_len": MAX_MODEL_LEN}]}
MAX_GROWTH_BYTES = 4 << 20


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_text_of_31_mib_is_refused_within_half_a_second(tmp_path: Path, path: str) -> None:
    text = "word " * ((31 << 20) // 5)
    prompt = {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
    raw = json.dumps({"model": MODEL, **prompt}).encode()
    with running_processes(tmp_path, prefill=(), decode=({"models": MODELS},)) as router:
        engine = router.engines["west-0"]
        before, started = resident_bytes(engine), _cpu_seconds(router)
        connection = http.client.HTTPConnection(router.url.removeprefix("http://"), timeout=60)
        connection.request("POST", path, raw, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer, taken = json.loads(response.read()), _cpu_seconds(router) - started
        connection.close()
        assert (response.status, f"at most {MAX_MODEL_LEN}" in answer["error"]["message"]) == (400, True)
        assert resident_bytes(engine) - before < MAX_GROWTH_BYTES
        assert taken < 0.5, "processor time, which a busy machine does not lengthen"


def _cpu_seconds(router: RouterProcess) -> float:
    fields = Path(f"/proc/{router.router.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
