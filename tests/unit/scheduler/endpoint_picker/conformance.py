"""Cases of llm-d (tests/data/llmd-conformance.json), and the ones that prfaas does not offer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parents[3] / "data"
CASES: list[dict[str, Any]] = json.loads((DATA / "llmd-conformance.json").read_text())["cases"]
PODS: dict[str, dict[str, str]] = json.loads((DATA / "llmd-conformance.json").read_text())["fixtures"]["pods"]
NOT_OFFERED = {
    "input-length": "prompts are counted by the engine's tokenizer, not estimated from the body",
    "disagg-profile-handler.series": "a test of the approximate prefix producer; the index here is exact",
    "approx-prefix-cache-producer": "the index here is exact",
    "context-length-aware": "the plugin is not offered: a configuration that names it is refused",
    "context-length-aware.range": "the plugin is not offered: a configuration that names it is refused",
    "sidecar.other-connectors": "the sidecar hands over by NIXL's two steps or our own grants",
    "sidecar.encode": "no encode stage is offered",
    "scorer.lora-affinity-scorer": "the plugin is not offered: a configuration that names it is refused",
    "scorer.session-affinity-scorer": "the plugin is not offered: a configuration that names it is refused",
    "filter.session-affinity": "the plugin is not offered: a configuration that names it is refused",
}
_NO_RETRIES = "after a failed prefill the decode engine computes the prompt, without a retry"
NOT_OFFERED_CASES = {
    ("routing-headers", "two encoders"): "no encode stage is offered",
    ("role-filters", "encode-filter"): "no encode stage is offered",
    ("prefix-based-pd-decider", "no endpoint"): "the decider runs after the choice of a decode endpoint",
    ("sidecar.prefill-header", "sampling, comma"): "the first host of the header prefills",
} | {
    ("sidecar.nixlv2", f"prefill answers {case}"): _NO_RETRIES
    for case in (
        "502 once, 2 retries allowed",
        "503 once, 2 retries allowed",
        "502, 2 retries allowed, 100 failures",
        "502, 0 retries allowed, 1 failures",
    )
}


def cases(*groups: str) -> pytest.MarkDecorator:
    """Return a parametrisation over the cases of some groups."""
    chosen = [
        case for case in CASES if case["group"] in groups and (case["group"], case["id"]) not in NOT_OFFERED_CASES
    ]
    assert chosen, groups
    return pytest.mark.parametrize("case", chosen, ids=[f"{case['group']}: {case['id']}" for case in chosen])
