"""A wrong configuration stops the start with file, line, key and the accepted form."""

from __future__ import annotations

from pathlib import Path

import pytest

from prfaas import config
from prfaas.errors import ConfigError
from prfaas.router.config import RouterConfig
from prfaas.router.http.admission import read_clients, read_key
from prfaas.router.sidecar.config import SidecarConfig

GOOD = """\
secret_file: /etc/prfaas/secret
clusters:
  - name: west
    kind: pd
    instances:
      - {name: w, url: "http://10.0.1.1:8000", role: both, agent: w, wire: "10.0.1.1:7400"}
  - name: east
    kind: prfaas
    instances:
      - {name: e, url: "http://10.0.2.1:8000", role: prefill, agent: e, wire: "10.0.2.1:7400"}
"""


def _load(text: str, tmp_path: Path) -> RouterConfig:
    path = tmp_path / "router.yaml"
    path.write_text(text)
    return config.load(RouterConfig, component="router", file=path, environment={})


def test_the_shape_of_the_documentation_loads(tmp_path: Path) -> None:
    loaded = _load(GOOD, tmp_path)
    assert [cluster.kind for cluster in loaded.clusters] == ["pd", "prfaas"]
    assert loaded.clusters[1].instances[0].role == "prefill"


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("kind: pd", "kind: gpu", r'line 4: clusters\[0\]\.kind: .*one of "prfaas", "pd"'),
        (
            "role: both",
            "role: nothing",
            r'line 6: clusters\[0\]\.instances\[0\]\.role: .*one of "prefill", "decode", "both"',
        ),
        ("role: prefill", "role: decode", r"line 9: .*e decodes, and a prfaas cluster never does"),
        ('"http://10.0.1.1:8000"', '"10.0.1.1:8000"', r"line 6: .*url: '10.0.1.1:8000'; write http://host:port"),
        ('wire: "10.0.1.1:7400"', "wire: nowhere", r"line 6: clusters\[0\]\.instances\[0\]\.wire: .*host:port"),
        ("name: e,", "name: w,", r"instance w is named twice"),
        ("name: east", "name: west", r"cluster west is named twice"),
        ("secret_file:", "treshold_tokens: 5\nsecret_file:", r"line 1: treshold_tokens: unknown key.*threshold_tokens"),
        ("secret_file:", "threshold_tokens: much\nsecret_file:", r"line 1: threshold_tokens: .*a number of tokens"),
        ("secret_file:", "cluster: north\nsecret_file:", r"line 1: cluster: 'north' is none of west, east"),
        (
            "secret_file:",
            "managers: [a:1]\nsecret_file:",
            r"line 3: clusters: needs no managers$",
        ),
        (
            "secret_file:",
            "local_policy: pd\nsecret_file:",
            r"local_policy: pd needs an instance that prefills, and cluster west has none; write role: prefill",
        ),
        ("secret_file:", "manager_timeout: 1s\nsecret_file:", r"line 1: manager_timeout: needs managers$"),
        ("secret_file:", "fetch_timeout: 1s\nsecret_file:", r"line 1: fetch_timeout: needs managers$"),
        (
            "secret_file:",
            "discovery:\n  kubernetes_port: 1\nsecret_file:",
            r"line 2: discovery.kubernetes_port: needs kubernetes_selector$",
        ),
        ("secret_file:", "max_requests: 0\nsecret_file:", r"line 1: max_requests: .*at least 1"),
        (
            "secret_file:",
            "discovery: {names: [a:1]}\nsecret_file:",
            r"discovery: managers and clusters name the instances",
        ),
        (
            "secret_file:",
            "traces_endpoint: nonsense\nsecret_file:",
            r"line 1: traces_endpoint: 'nonsense'; write http://h",
        ),
        (
            "secret_file:",
            "ext_proc_listen: 127.0.0.1:8000\nsecret_file:",
            r"line 1: ext_proc_listen: .*taken by listen",
        ),
        ("secret_file:", "managers: [a]\nsecret_file:", r"line 1: managers: 'a': not host:port; write host:port"),
        ("secret_file:", "discovery: {names: [a]}\nsecret_file:", r"names: .*a.*host:port"),
        (
            "secret_file:",
            "quotas: [{client: a}, {client: a}]\nsecret_file:",
            r"quotas: a client is named twice",
        ),
        ("kind: pd", "kind: prfaas", r"no pd cluster with an instance, no managers and no discovery"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(old: str, new: str, named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=named):
        _load(GOOD.replace(old, new, 1), tmp_path)


@pytest.mark.parametrize("setting", ["local_policy: pd", "without_prefill: refuse"])
def test_what_managers_decide_is_not_a_routers_to_set(setting: str, tmp_path: Path) -> None:
    named = rf"line 1: {setting.partition(':')[0]}: needs no managers$"
    with pytest.raises(ConfigError, match=named):
        _load(f"{setting}\nmanagers: [a:1]\nsecret_file: s\n", tmp_path)


def test_the_policy_pd_asks_a_prefill_instance_of_the_clusters_that_decode_here(tmp_path: Path) -> None:
    more = '      - {name: p, url: "http://10.0.1.2:8000", role: prefill, agent: p, wire: "10.0.1.2:7400"}\n'
    pd = "local_policy: pd\n" + GOOD.replace("  - name: east", more + "  - name: east")
    assert _load(pd, tmp_path).local_policy == "pd"
    others = pd.replace("name: east\n    kind: prfaas", "name: east\n    kind: pd")
    others = others.replace("role: prefill, agent: e", "role: both, agent: e")
    with pytest.raises(ConfigError, match="cluster east has none"):
        _load(others, tmp_path)
    assert _load(f"cluster: west\n{others}", tmp_path).cluster == "west"


def test_a_sidecar_that_sends_both_legs_at_once_refuses_to_be_told_of_retries() -> None:
    settings = {"protocol": "prfaas", "prefill_retries": 2}
    with pytest.raises(ConfigError, match=r"prefill_retries: needs protocol: nixl$"):
        config.load_mapping(SidecarConfig, settings, where="test")


def test_a_file_without_keys_is_refused_by_its_setting(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# nobody\n\n")
    with pytest.raises(ConfigError, match=r"api_keys_file: .*has no key"):
        read_clients(tmp_path / "keys", setting="api_keys_file")
    with pytest.raises(ConfigError, match=r"api_keys_file: .*cannot be read"):
        read_clients(tmp_path / "absent", setting="api_keys_file")


def test_a_key_is_its_clients_whose_name_follows_it(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one\n  two acme\n# not me\nthree   acme\n")
    assert read_clients(tmp_path / "keys", setting="s") == {"one": "default", "two": "acme", "three": "acme"}
    (tmp_path / "keys").write_text("one acme corp\n")
    with pytest.raises(ConfigError, match=r"s: .*3 words; write KEY or KEY CLIENT"):
        read_clients(tmp_path / "keys", setting="s")


def test_engines_have_one_key(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("one\ntwo\n")
    with pytest.raises(ConfigError, match="has 2 keys; write one"):
        read_key(tmp_path / "key", setting="s")
    assert read_key(None, setting="s") == ""
