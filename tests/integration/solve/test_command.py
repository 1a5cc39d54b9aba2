"""`prfaas-solve` as people run it: the case study against Table 6, its JSON, its files, its refusals."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prfaas import config
from prfaas.cli.solve import main
from prfaas.manager.config import ManagerConfig
from prfaas.model.cost.egress_price import EgressPrice
from prfaas.solve.files.deployment_file import read_deployment

FIELDS = [
    "name", "threshold_tokens", "num_prfaas", "num_prefill", "num_decode", "offload_ratio", "mean_offloaded_tokens",
    "prfaas_throughput", "pd_prefill_throughput", "pd_decode_throughput", "system_throughput", "egress_gbps",
    "ttft_mean_seconds", "ttft_p90_seconds", "cost_per_hour",
]  # fmt: skip

TWO_CLUSTERS = """
model: internal-1t-hybrid
prfaas:
  - {name: east, profile: h200-internal-1t, instances: 4}
  - {name: west, profile: h200-internal-1t, instances: 2, bandwidth: 8Gbps}
pd:
  - {name: a, profile: h20-internal-1t, instances: 8}
  - {name: b, profile: h20-internal-1t, instances: 5}
links:
  - {source: east, target: a, bandwidth: 5Gbps}
  - {source: east, target: b, bandwidth: 20Gbps}
  - {source: west, target: b, bandwidth: 10Gbps}
"""


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def answer_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(answer(capsys, *arguments, "--json"))
    return found


def test_the_json_has_its_shape(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer_json(capsys)
    assert list(found) == ["trace", "deployments", "bound"]
    assert [list(each) for each in found["deployments"]] == [FIELDS] * 3
    assert list(found["bound"]) == ["system_throughput", "integer_split_system_throughput", "duals"]
    _, homogeneous, naive = found["deployments"]
    for field in ("threshold_tokens", "num_prfaas", "offload_ratio", "prfaas_throughput", "egress_gbps"):
        assert homogeneous[field] is None
    assert (naive["threshold_tokens"], naive["num_prefill"], naive["pd_prefill_throughput"]) == (None, None, None)
    best, bound = found["deployments"][0]["system_throughput"], found["bound"]["integer_split_system_throughput"]
    assert 0 <= 1 - best / bound < 1e-3
    assert all(math.isfinite(value) and value >= 0 for value in found["bound"]["duals"].values())


def test_report_marks_inferred_inputs_and_shows_the_bound(capsys: pytest.CaptureFixture[str]) -> None:
    text = answer(capsys, "--trace", "lognormal", "--explain")
    for line in ("internal-1t-hybrid", "h20-internal-1t", "cost"):
        assert any(line in row and "inferred" in row for row in text.splitlines()), line
    for words in ("below it", "1 % slower"):
        assert words in text
    assert max(len(row) for row in text.splitlines() if row.startswith("  ")) <= 132


def test_the_plan_comes_first_in_a_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    short, long = answer(capsys), answer(capsys, "--explain")
    assert [row.split()[0] for row in short.splitlines()] == ["plan", "roles", "sustains", "costs", "limit", "inferred"]
    assert long.startswith(short)


TRIAL = ("--prfaas", "16xH100", "--pd", "64xH20", "--bandwidth", "25Gbps")
HYBRIDS = ["Qwen3-Next", "Kimi-Linear", "Granite-4.0-H-Small", "gpt-oss-120b", "MiMo-V2-Flash", "Jamba-1.5-Mini"]


@pytest.mark.parametrize("model", HYBRIDS)
def test_a_model_by_name_and_numbers_of_gpus_are_enough(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: str
) -> None:
    page = tmp_path / "plan.html"
    text = answer(capsys, "--model", model, *TRIAL, "--plot", str(tmp_path), "--html", str(page))
    assert "0.75 to 1.35 times as long" in text
    assert "prfaas-h100: 2 prefill" in text
    assert (tmp_path / "threshold.svg").is_file()
    assert "prfaas-h100: 2 prefill" in page.read_text()


@pytest.mark.parametrize(("more", "clusters"), [("72xH20", TRIAL[:2]), ("64xH20", ("--prfaas", "24xH100"))])
def test_the_named_purchase_adds_what_its_own_plan_sustains(
    capsys: pytest.CaptureFixture[str], more: str, clusters: tuple[str, str]
) -> None:
    """The linear program would promise 0.90 of an instance, since its instances may divide their time."""
    model = ("--model", "Qwen3-Next", "--bandwidth", "25Gbps")
    plain = answer_json(capsys, *model, *TRIAL)["deployments"][0]["system_throughput"]
    grown = answer_json(capsys, *model, *clusters, "--pd", more)["deployments"][0]["system_throughput"]
    found = re.search(r"of (\S+) adds ([\d.]+) req/s", answer(capsys, *model, *TRIAL, "--prices", "h100=99,h20=1"))
    dear = re.search(r"of (\S+) adds ([\d.]+) req/s", answer(capsys, *model, *TRIAL, "--prices", "h100=1,h20=99"))
    named = {match[1]: float(match[2]) for match in (found, dear) if match}
    assert named["pd-h20" if more == "72xH20" else "prfaas-h100"] == pytest.approx(grown - plain, abs=0.006)


def test_every_output_shows_the_fleet_that_the_demand_chose(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    demand, emitted = ("--prices", "h200=24,h20=12", "--demand", "2req/s"), tmp_path / "manager.yaml"
    found = answer_json(capsys, *demand, "--emit", str(emitted), "--plot", str(tmp_path))
    plan, fleet = found["deployments"][0], found["fleet"]
    (part,) = fleet["parts"]
    assert fleet["instances"] == {"h200": plan["num_prfaas"], "h20": part["num_prefill"] + part["num_decode"]}
    assert found["pd_alone"]["cost_per_hour"] > fleet["cost_per_hour"] == plan["cost_per_hour"]
    assert fleet["instances"]["h20"] == 5, "the case study has 8"
    t = plan["threshold_tokens"]
    assert t == part["threshold_tokens"]
    assert f"# h200: {plan['num_prfaas']} prefill\nthreshold_tokens: {t}\n" in emitted.read_text()
    assert f"N_p/N_d = 1/4: 2.50 req/s at t = {t}" in (tmp_path / "threshold.svg").read_text()
    text = answer(capsys, *demand, "--explain", "--html", str(tmp_path / "plan.html"))
    assert [row.split()[0] for row in text.splitlines()[:5]] == ["fleet", "plan", "serves", "costs", "instead"]
    assert re.search(rf"threshold t, tokens +{t} ", text)
    assert f"<td>{t}</td>" in (tmp_path / "plan.html").read_text()


def test_demand_by_the_hour_and_a_budget_have_fleets(capsys: pytest.CaptureFixture[str]) -> None:
    prices = ("--prices", "h200=24,h20=12", "--egress-price", "0.005, 200/Gbps")
    day = answer(capsys, *prices, "--demand", "0.5req/s, 2req/s@8-18")
    assert [row.split()[0] for row in day.splitlines() if not row.startswith(" ")][:4] == [
        "fleet",
        "from",
        "from",
        "from",
    ]
    found = answer_json(capsys, *prices, "--demand", "0.5req/s, 2req/s@8-18")
    assert [part["requests_per_second"] for part in found["fleet"]["parts"]] == [2.0, 0.5, 0.5]
    assert found["deployments"][0]["threshold_tokens"] == found["fleet"]["parts"][0]["threshold_tokens"]
    assert "for the money" in answer(capsys, *prices, "--budget", "170")


def test_a_fleet_that_follows_the_demand_costs_each_of_its_fleets_for_its_hours(
    capsys: pytest.CaptureFixture[str],
) -> None:
    prices = ("--prices", "h200=24,h20=12", "--egress-price", "0.005")
    peak, quiet = (
        answer_json(capsys, *prices, "--demand", rate)["fleet"]["cost_per_hour"] for rate in ("2req/s", "0.5req/s")
    )
    text = answer(capsys, *prices, "--demand", "0.5req/s, 2req/s@8-14")
    found = re.search(r"follows the demand costs ([\d.]+) an hour", text)
    assert found
    assert float(found[1]) == pytest.approx((6 * peak + 18 * quiet) / 24, abs=0.005)


def test_power_and_carbon_add_to_the_price(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (file := tmp_path / "d.yaml").write_text(
        "model: internal-1t-hybrid\n"
        "pd:\n"
        '  - {name: a, profile: h20-internal-1t, instances: 8, price: 5, power: 10, power_price: "0.10, 0.04@0-12",'
        " carbon: 0.5, carbon_price: 80}\n"
        "  - {name: b, profile: h20-internal-1t, instances: 2, price: 5}\n"
    )
    deployment, _ = read_deployment(file)
    # A kWh costs 0.07 on average, and its half kilogram 0.04.
    assert [cluster.price_per_hour for cluster in deployment.pd] == pytest.approx([5 + 10 * 0.11, 5])
    assert "58.80 an hour" in (text := answer(capsys, "--deployment", str(file)))
    assert "draws 80 kW, 40 kg of CO2 an hour" in text


def test_the_dearest_link_counts_for_its_cluster(tmp_path: Path) -> None:
    file = tmp_path / "d.yaml"
    file.write_text(TWO_CLUSTERS.replace("bandwidth: 20Gbps", "bandwidth: 20Gbps, egress_price: 0.02"))
    prices = [cluster.egress_price for cluster in read_deployment(file)[0].prfaas]
    assert prices == [EgressPrice(0.02), None]


@pytest.mark.parametrize(("hour", "pays"), [("12", False), ("23", True)])
def test_hour_decides_whether_prefill_elsewhere_pays(capsys: pytest.CaptureFixture[str], hour: str, pays: bool) -> None:
    prices = ("--prices", "h200=24,h20=12", "--egress-price", "1, 0@22-6")
    assert ("does not pay" in answer(capsys, *prices, "--demand", "2req/s", "--hour", hour)) is not pays


def test_a_profile_of_another_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "MiniMax-M2.5"]) == 2
    error = capsys.readouterr().err
    assert "h200-internal-1t" in error and "MiniMax-M2.5" in error


def test_one_measured_prefill_replaces_the_band(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "d.yaml"
    cluster = "name: far, hardware: H100, instances: 2, bandwidth: 25Gbps"
    local = "  - {name: near, hardware: H20, instances: 8}\n"
    rest = f"pd:\n{local}"
    file.write_text(f"model: Qwen3-Next\nprfaas:\n  - {{{cluster}}}\n{rest}")
    inferred = answer_json(capsys, "--deployment", str(file))["deployments"][0]
    file.write_text(f"model: Qwen3-Next\nprfaas:\n  - {{{cluster}, measured: 32K=3s}}\n{rest}")
    scaled = answer_json(capsys, "--deployment", str(file))["deployments"][0]
    assert scaled["threshold_tokens"] > inferred["threshold_tokens"]
    assert "scaled to one measured point" in answer(capsys, "--deployment", str(file))


def test_plan_for_several_clusters_shows_the_cost_of_one_threshold(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "d.yaml"
    file.write_text(TWO_CLUSTERS)
    found = answer_json(capsys, "--deployment", str(file))
    best = found["deployments"][0]
    assert best["num_prfaas"] == 6
    assert best["num_prefill"] + best["num_decode"] == 13
    assert best["system_throughput"] <= found["bound"]["integer_split_system_throughput"]
    assert "gbps:east->a" in found["bound"]["duals"]


def test_a_trace_file_is_planned_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("length,output_tokens\n" + "".join(f"{100 + 37 * i},{200 + i}\n" for i in range(1000)))
    found = answer_json(capsys, "--trace", str(trace))
    assert found["trace"]["mean_uncached_tokens"] == pytest.approx(100 + 37 * 499.5)
    assert found["trace"]["mean_output_tokens"] == pytest.approx(699.5)


def test_flags_override_the_deployment(capsys: pytest.CaptureFixture[str]) -> None:
    plain = answer_json(capsys)["deployments"][0]
    narrow = answer_json(capsys, "--bandwidth", "5Gbps")["deployments"][0]
    assert narrow["egress_gbps"] == pytest.approx(5, rel=1e-3)
    assert narrow["threshold_tokens"] > plain["threshold_tokens"]
    slow = answer_json(capsys, "--slo", "decode=30tok/s")["deployments"][0]
    assert slow["pd_decode_throughput"] / slow["num_decode"] > plain["pd_decode_throughput"] / plain["num_decode"]
    priced = answer_json(capsys, "--prices", "h200=40,h20=10")["deployments"][0]
    assert priced["cost_per_hour"] == 4 * 40 + 8 * 10


def test_feasible_ttft_objective_has_a_greatest_rate(capsys: pytest.CaptureFixture[str]) -> None:
    assert "the TTFT objective holds up to" in answer(capsys, "--slo", "ttft=6s", "--explain")


def test_manager_loads_the_emitted_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    emitted = tmp_path / "manager.yaml"
    found = answer_json(capsys, "--emit", str(emitted))
    settings = config.load(
        ManagerConfig, component="manager", file=emitted, environment={}, flags={"secret_file": str(tmp_path)}
    )
    assert settings.threshold_tokens == found["deployments"][0]["threshold_tokens"]


def test_plots_are_reproducible(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    answer(capsys, "--plot", str(tmp_path / "one"))
    answer(capsys, "--plot", str(tmp_path / "two"))
    names = {"load.svg", "split.svg", "threshold.svg"}
    assert {file.name for file in (tmp_path / "one").iterdir()} == names
    for name in names:
        drawn = (tmp_path / "one" / name).read_bytes()
        assert len(drawn) > 5000
        assert drawn == (tmp_path / "two" / name).read_bytes()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--trace", "nowhere.csv"], "nowhere.csv"),
        (["--model", "gpt-9"], "gpt-9"),
        (["--bandwidth", "100"], "unit missing"),
        (["--bandwidth", "0Gbps"], "above 0"),
        (["--slo", "decode=100tok/s"], "64.5 tok/s"),
        (["--slo", "ttft=1s"], "3.50 s even without any queue"),
        (["--slo", "speed=1"], "speed"),
        (["--slo", "ttft"], "key=value"),
        (["--prices", "h100=3"], "h100"),
        (["--prices", "h200=cheap"], "cheap"),
        (["--load", "3rps"], "--load"),
        (["--model", "Qwen3-Next", "--pd", "many"], "16xH100"),
        (["--model", "Qwen3-Next", "--pd", "12xH20:8"], "whole number"),
        (["--model", "Qwen3-Next", "--pd", "8xTPU"], "hardware 'TPU'"),
        (["--model", "Qwen3.5-397B-A17B", "--pd", "8xH100"], "do not fit"),
        (["--pd", "8xH20"], "needs --model"),
        (["--egress-price", "0.05, 0.02@night"], "no hours"),
        (["--demand", "80%"], "requests per second"),
        (["--demand", "1req/s, 2req/s@9"], "no hours"),
        (["--budget", "0.5"], "buys no fleet"),
        (["--demand", "900req/s"], "three times the instances"),
        (["--demand", "0.5req/s, 2req/s@8-18", "--emit", "/dev/null"], "differ by the hour"),
        (["--deployment", "nowhere.yaml"], "nowhere.yaml"),
        (["--emit", "/nonexistent/file"], "/nonexistent/file"),
    ],
)
def test_unusable_input_is_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    try:
        status: object = main(arguments)
    except SystemExit as stopped:
        status = stopped.code
    error = capsys.readouterr().err
    assert status == 2
    assert (error.count("\n"), error.startswith("prfaas-solve: "), named in error) == (1, True, True), error


@pytest.mark.parametrize(
    ("absent", "arguments", "extra"), [("highspy", [], "site"), ("matplotlib", ["--plot", "plots"], "plot")]
)
def test_a_missing_extra_is_named(tmp_path: Path, absent: str, arguments: list[str], extra: str) -> None:
    code = f"import sys; sys.modules['{absent}'] = None; from prfaas.cli.solve import main; sys.exit(main())"
    line = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(line, capture_output=True, text=True, timeout=150, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (
        2,
        f"prfaas-solve: {absent} is not installed; run: pip install 'prfaas[{extra}]'\n",
    )
