import json
from pathlib import Path

import pytest

from prfaas.errors import ConfigError
from prfaas.solve.files import catalog
from prfaas.solve.files.deployment_file import read_deployment

CLUSTERS = """
model: internal-1t-hybrid
prfaas: [{name: far, profile: h200-internal-1t, instances: 4, bandwidth: 10Gbps}]
pd: [{name: near, profile: h20-internal-1t, instances: 8}]
"""


@pytest.mark.parametrize("name", catalog.names("models"))
def test_every_catalogued_model_keeps_some_kv_and_says_where_its_geometry_is_from(name: str) -> None:
    geometry = catalog.find_model(name)
    assert geometry.kv_bytes(1024) > 1 << 20
    assert len(geometry.source) > 20


def test_a_config_json_is_a_model(tmp_path: Path) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert catalog.find_model("config.json", beside=tmp_path).bytes_per_token == 2 * 4 * 2 * 16 * 2


@pytest.mark.parametrize("text", ["[", "[]", "3"])
def test_invalid_model_config_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        catalog.find_model("config.json", beside=tmp_path)


@pytest.mark.parametrize(
    ("model", "measured_with", "is_marked"),
    [
        ("Qwen3-Next", "Qwen/Qwen3-Next-80B-A3B-Instruct", False),
        ("Qwen3-Next", "our-model", True),
        ("config.json", "Qwen/Qwen3-Next-80B-A3B-Instruct", True),
    ],
)
def test_profile_whose_model_cannot_be_compared_is_marked(
    tmp_path: Path, model: str, measured_with: str, is_marked: bool
) -> None:
    entry = json.loads((catalog.FOLDER / "models" / "Qwen3-Next-80B-A3B.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(entry["config"]))
    points = "[{tokens: 1K, seconds: 1}, {tokens: 2K, seconds: 2}, {tokens: 4K, seconds: 5}]"
    (tmp_path / "p.yaml").write_text(
        f"{{name: p, hardware: X, source: test, model: {measured_with}, prefill: {{points: {points}}}}}"
    )
    text = f"model: {model}\npd: [{{name: near, profile: p.yaml, instances: 8}}]\n"
    (cluster,) = read_deployment(written(tmp_path, text))[0].pd
    assert any(measured_with in text for text in cluster.profile.inferred) == is_marked


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="Kimi-Linear-48B-A3B"):
        catalog.find_model("kimi")
    with pytest.raises(ConfigError, match="h20-internal-1t"):
        catalog.find_profile("h20")


def written(folder: Path, text: str) -> Path:
    path = folder / "d.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_deployment_reads_its_units(tmp_path: Path) -> None:
    deployment, _ = read_deployment(written(tmp_path, CLUSTERS + "slo: {decode: 30tok/s, ttft: 5s, quantile: 95%}\n"))
    assert deployment.egress(deployment.prfaas[0]) == 1.25e9
    assert (deployment.objectives.decode_tokens_per_second, deployment.objectives.ttft_seconds) == (30, 5)
    assert deployment.objectives.ttft_quantile == 0.95


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (CLUSTERS.replace("10Gbps", "10"), "bandwidth.*unit missing"),
        (CLUSTERS.replace("near", "far"), "same name"),
        (CLUSTERS.replace("instances: 8", "instances: 8, prefill_instances: 9"), "only 8 instances"),
        (CLUSTERS.replace("h20-internal-1t", "h21"), "h21"),
        (CLUSTERS + "links: [{source: near, target: far, bandwidth: 1Gbps}]\n", "near -> far"),
        ("model: internal-1t-hybrid\npd: []\n", "at least one PD cluster"),
    ],
)
def test_inconsistent_deployment_is_refused(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_deployment(written(tmp_path, text))
