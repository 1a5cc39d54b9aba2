"""`prfaas-sim` as people call it."""

import json
from pathlib import Path

import pytest

from prfaas.cli.sim import main
from prfaas.solve.files import catalog
from tools.reference_tables import ROOT

SMALL = ["--requests", "500"]

PPD_TABLE = str(ROOT / "tests/data/ppd-table-2P2D.json")


def output(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main([*SMALL, *argv]) == 0
    return capsys.readouterr().out


def test_the_same_seed_gives_the_same_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    first = output(capsys, "--json", "--seed", "7")
    assert output(capsys, "--json", "--seed", "7") == first
    assert output(capsys, "--json", "--seed", "8") != first


def test_compared_variants_have_the_same_arrivals(capsys: pytest.CaptureFixture[str]) -> None:
    runs = json.loads(output(capsys, "--json", "--compare", "variant=prfaas-pd,homogeneous-pd"))
    assert [run["name"] for run in runs] == ["prfaas-pd", "homogeneous-pd"]
    assert runs[0]["arrivals"] == runs[1]["arrivals"]
    assert runs[0]["capacity"] != runs[1]["capacity"]


def test_compared_loads_have_their_own_rates(capsys: pytest.CaptureFixture[str]) -> None:
    runs = json.loads(output(capsys, "--json", "--compare", "load=50%,90%"))
    assert runs[1]["rate"] == pytest.approx(runs[0]["rate"] * 1.8)


def test_the_table_names_latencies_and_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    table = output(capsys)
    for line in ("TTFT P99 (s)", "ITL mean (s)", "goodput (req/s)", "egress (Gbps)", "reason long", "busy pd-decode"):
        assert line in table


def test_a_recorded_trace_arrives_at_its_own_times(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = [
        {"timestamp": 1000 * index, "input_length": 1024, "output_length": 8, "hash_ids": [0, index]}
        for index in range(1, 5)
    ]
    rows[0]["input_length"] = 900
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, rows)))
    (run,) = json.loads(output(capsys, "--json", "--trace", str(trace), "--arrivals", "trace", "--warmup", "0"))
    assert run["num_requests"] == 4
    assert run["arrivals"] == run["rate"] == pytest.approx(1.0)


def test_later_turns_find_their_caches_under_each_policy(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--fidelity", "instances", "--turns", "4096>64,256>64", "--load", "1req/s", "--ppd-table", PPD_TABLE]
    always, ppd = json.loads(output(capsys, "--json", *argv, "--compare", "local_policy=pd,ppd"))
    assert always["reasons"] == {"pd": 1.0}
    assert ppd["reasons"] == pytest.approx({"ppd_table_local": 0.5, "ppd_first_turn": 0.5}, abs=0.05)
    assert ppd["ttft"]["mean"] < always["ttft"]["mean"]


def test_recorded_conversations_are_simulated(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Three turns and one turn, in turn: of 500 conversations 250 have each."""
    file = tmp_path / "wildchat.jsonl"
    message = [{"role": role, "content": "x" * 4000} for role in ("user", "assistant") * 3]
    file.write_text("\n".join(json.dumps({"conversation": turn}) for turn in (message, message[:2])))
    argv = ["--json", "--fidelity", "instances", "--conversations", str(file), "--warmup", "0", "--load", "1req/s"]
    (run,) = json.loads(output(capsys, *argv))
    assert run["num_requests"] == 250 * 3 + 250


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--load", "fast"], "load 'fast'"),
        (["--compare", "speed=1,2"], "write a setting and its values"),
        (["--arrivals", "gamma:cw=3"], "cw"),
        (["--deployment", "nowhere.yaml"], "nowhere.yaml"),
        (["--fidelity", "instances", "--turns", "8>8", "--conversations", "a.json"], "one of the two"),
        (["--shared", "true"], "shared: needs fidelity: instances"),
        (["--fidelity", "instances", "--turns", "0>8"], "each brings a token or more"),
        (["--fidelity", "instances", "--local-policy", "ppd"], "local_policy: ppd needs ppd_table"),
        (["--fidelity", "instances", "--role-changes", "h200-000@1s=decode+1s"], "h200-000 is of a PrfaaS cluster"),
        (["--arrivals", "gamma:depth=30%"], "depth: needs process: diurnal"),
        (["--prefill-instances", "8"], "prefill_instances: 8 of 8 leave none that decodes"),
        (["--arrivals", "trace"], "arrivals: trace needs trace"),
        (["--arrivals", "trace", "--trace", "t.jsonl", "--load", "2req/s"], "load: a trace arrives at its own times"),
        (["--fidelity", "instances", "--think", "3s"], "think: needs turns or conversations"),
        (["--fidelity", "instances", "--kv-tokens", "1"], "kv_tokens: 1 do not hold the longest request"),
        (["--fidelity", "instances", "--outages", "h20-001@1m+1m,h20-001@90s+1m"], "h20-001 is dead from 60s to 120s"),
        (["--fidelity", "instances", "--role-changes", "h20-999@5m=decode+1m"], "role_changes: no instance h20-999"),
    ],
)
def test_unusable_input_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    assert main([*SMALL, *argv]) == 2
    written = capsys.readouterr().err
    assert message in written
    assert written.count("\n") == written.count("prfaas-sim:") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"entries": [', "Expecting value"),
        ('{"entries": [], "weights": {"w_ttft": 1, "w_tpot": 1}}', "at least one entry"),
    ],
)
def test_unusable_ppd_table_is_named_with_the_accepted_form(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, message: str
) -> None:
    (table := tmp_path / "table.json").write_text(text)
    argv = ["--fidelity", "instances", "--local-policy", "ppd", "--ppd-table", str(table)]
    assert main([*SMALL, *argv]) == 2
    written = capsys.readouterr().err
    assert written.startswith(f"prfaas-sim: ppd_table: {table}: ")
    assert message in written and "as prfaas-ppd writes it" in written


def test_short_trace_is_reported(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = [{"timestamp": index, "input_length": 100 + index, "output_length": 8} for index in range(20)]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, rows)))
    argv = ["--trace", str(trace), "--arrivals", "trace", "--warmup", "0"]

    def is_reported(num_requests: str) -> bool:
        assert main([*argv, "--requests", num_requests]) == 0
        return "the trace has no more requests" in capsys.readouterr().out

    assert is_reported("9999")
    assert not is_reported("20")


def test_partly_shared_deployment_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    whole = catalog.deployment_path(catalog.CASE_STUDY).read_text(encoding="utf-8")
    file = tmp_path / "shared.yaml"
    file.write_text(whole.replace("instances: 8,", "instances: 8, shared_instances: 2, overlap: 20%,"))
    assert main([*SMALL, "--deployment", str(file)]) == 2
    assert (
        "shared_instances: here all or none share; write fidelity: instances, shared: true" in capsys.readouterr().err
    )
    assert main([*SMALL, "--deployment", str(file), "--fidelity", "instances", "--shared", "true"]) == 0


def test_setting_of_only_some_compared_variants_is_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--json", "--compare", "fidelity=stations,instances", "--turns", "4096>8,600>8"]
    apart, together = json.loads(output(capsys, *argv))
    assert together["cached_ratio"] > apart["cached_ratio"]
