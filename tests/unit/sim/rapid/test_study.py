"""RAPID-Serve's ratios in the twin."""

from dataclasses import replace

import pytest

from benchmarks.studies.rapid.experiment import FREE_TRANSFER, TRACES, run, saturated_throughput
from benchmarks.studies.rapid.study import SETTINGS, cell, claims

LARGE, ARXIV = SETTINGS["Llama-70B"], TRACES[1]


def test_shared_node_beats_chunked_and_disaggregated_nodes() -> None:
    sustained = {
        name: saturated_throughput(name, LARGE, ARXIV, count=150)
        for name in ("rapid", "chunked-512", "chunked-1024", "disaggregated")
    }
    assert sustained["rapid"] > sustained["chunked-1024"] > sustained["chunked-512"]
    assert sustained["rapid"] > sustained["disaggregated"]


def test_hand_over_costs_throughput_and_latency() -> None:
    free = replace(LARGE, transfer=FREE_TRANSFER)
    sustained = [saturated_throughput("disaggregated", hardware, ARXIV, count=150) for hardware in (free, LARGE)]
    assert sustained[0] > 1.3 * sustained[1]
    idle = [run("disaggregated", hardware, ARXIV, rate=0.1, count=60).ttft.mean for hardware in (free, LARGE)]
    assert idle[1] > 1.7 * idle[0]


@pytest.mark.soak
def test_every_printed_ratio_is_met() -> None:
    found = [cell((model, trace)) for model in SETTINGS for trace in TRACES]
    assert [claim for claim in claims(found) if not claim.holds] == []
