from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from prfaas.manager.planning.what_if import Present, answer, form
from prfaas.model.deployment import ClusterPath
from prfaas.solve.files.deployment_file import read_deployment
from prfaas.solve.files.traces import find_trace

FILE = """
model: internal-1t-hybrid
trace: lognormal
prfaas:
  - {name: east, profile: h200-internal-1t, instances: 4, bandwidth: 100Gbps}
pd:
  - {name: west, profile: h20-internal-1t, instances: 8, prefill_instances: 3}
"""


@pytest.fixture(scope="module")
def present(tmp_path_factory: pytest.TempPathFactory) -> Present:
    file = tmp_path_factory.mktemp("what-if") / "deployment.yaml"
    file.write_text(FILE)
    deployment, written = read_deployment(file)
    return Present(deployment, find_trace(written.trace, beside=None), "trace lognormal", 2.0)


def test_form_has_the_present_values(present: Present) -> None:
    east, west = form(present)["clusters"]
    assert east == {"name": "east", "kind": "prfaas", "instances": 4, "egress_bytes_per_second": 12.5e9}
    assert west == {"name": "west", "kind": "pd", "instances": 8, "num_prefill": 3}


def test_unchanged_question_gives_the_same_plan(present: Present) -> None:
    asked = {"clusters": {"east": {"instances": 4}, "west": {"instances": 8, "num_prefill": 3}}}
    found = answer(present, asked)
    assert found["today"] == found["what_if"]
    assert found["today"]["arrivals_per_second"] == 2.0


def test_more_instances_sustain_more(present: Present) -> None:
    found = answer(present, {"clusters": {"west": {"instances": 12, "num_prefill": None}}})
    assert found["what_if"]["requests_per_second"] > found["today"]["requests_per_second"]
    assert sum(found["what_if"]["splits"]["west"]) == 12


def test_egress_scales_the_links(present: Present) -> None:
    linked = replace(present, deployment=replace(present.deployment, paths=(ClusterPath("east", "west", 50e6),)))
    assert form(linked)["clusters"][0]["egress_bytes_per_second"] == 50e6
    asked = {"clusters": {"east": {"egress_bytes_per_second": 12.5e9}}}
    found, wide = answer(linked, asked), answer(present, {})
    assert found["today"]["requests_per_second"] < found["what_if"]["requests_per_second"]
    assert math.isclose(found["what_if"]["requests_per_second"], wide["today"]["requests_per_second"])
    unlimited = answer(linked, {"clusters": {"east": {"egress_bytes_per_second": None}}})
    assert unlimited["what_if"]["requests_per_second"] >= found["what_if"]["requests_per_second"]


@pytest.mark.parametrize(
    ("question", "word"),
    [
        ({"clusters": {"mars": {}}}, "mars"),
        ({"clusters": []}, "clusters"),
        ({"clusters": {"east": 4}}, "clusters"),
        ({"clusters": {"east": {"instances": -1}}}, "instances"),
        ({"clusters": {"east": {"instances": None}}}, "instances"),
        ({"clusters": {"east": {"instances": True}}}, "instances"),
        ({"clusters": {"east": {"egress_bytes_per_second": "much"}}}, "egress"),
        ({"clusters": {"west": {"instances": 0}}}, "decode"),
        ({"clusters": {"west": {"num_prefill": 8}}}, "decode"),
        ({"arrivals_per_second": float("inf")}, "arrivals"),
    ],
)
def test_malformed_question_is_refused(present: Present, question: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        answer(present, question)


def test_deployment_without_pd_cluster_is_refused(present: Present) -> None:
    with pytest.raises(ValueError, match="PD cluster"):
        answer(replace(present, deployment=replace(present.deployment, pd=())), {})
