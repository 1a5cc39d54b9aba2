"""Settings of router and sidecar: errors name line, key and accepted form."""

from pathlib import Path

import pytest

from prfaas import config
from prfaas.errors import ConfigError
from prfaas.router.config import RouterConfig

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


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("kind: pd", "kind: gpu", r'line 4: clusters\[0\]\.kind: .*one of "prfaas", "pd"'),
        ("role: prefill", "role: decode", r"line 9: .*e decodes, and a prfaas cluster never does"),
        ('"http://10.0.1.1:8000"', '"10.0.1.1:8000"', r"line 6: .*url: '10.0.1.1:8000'; write http://host:port"),
        ("name: e,", "name: w,", r"instance w is named twice"),
        ("name: east", "name: west", r"cluster west is named twice"),
        ("secret_file:", "cluster: north\nsecret_file:", r"line 1: cluster: 'north' is none of west, east"),
        (
            "secret_file:",
            "managers: [a:1]\nthreshold_tokens: 5\nsecret_file:",
            r"line 2: threshold_tokens: needs no managers$",
        ),
        (
            "secret_file:",
            "managers: [a:1]\nthreshold_tokens: 16K\nsecret_file:",  # The default, which managers overrule too.
            r"line 2: threshold_tokens: needs no managers$",
        ),
        ("secret_file:", "fleet_file: f\nsecret_file:", r"line 1: fleet_file: needs managers$"),
        (
            "secret_file:",
            "local_policy: pd\nsecret_file:",
            r"local_policy: pd needs an instance that prefills, and cluster west has none; write role: prefill",
        ),
        (
            "secret_file:",
            "traces_endpoint: nonsense\nsecret_file:",
            r"line 1: traces_endpoint: 'nonsense'; write http://h",
        ),
        (
            "secret_file:",
            "ext_proc_listen: 127.0.0.1:8080\nsecret_file:",
            r"line 1: ext_proc_listen: .*also used by listen",
        ),
        ("secret_file:", "managers: [a]\nsecret_file:", r"line 1: managers: 'a': not host:port; write host:port"),
        ("kind: pd", "kind: prfaas", r"no pd cluster with an instance and no managers"),
    ],
)
def test_error_names_the_line_and_the_setting(old: str, new: str, named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=named):
        _load(GOOD.replace(old, new, 1), tmp_path)


def test_policy_pd_needs_a_prefill_instance_in_each_decoding_cluster(tmp_path: Path) -> None:
    more = '      - {name: p, url: "http://10.0.1.2:8000", role: prefill, agent: p, wire: "10.0.1.2:7400"}\n'
    pd = "local_policy: pd\n" + GOOD.replace("  - name: east", more + "  - name: east")
    assert _load(pd, tmp_path).local_policy == "pd"
    others = pd.replace("name: east\n    kind: prfaas", "name: east\n    kind: pd")
    others = others.replace("role: prefill, agent: e", "role: both, agent: e")
    with pytest.raises(ConfigError, match="cluster east has none"):
        _load(others, tmp_path)
    assert _load(f"cluster: west\n{others}", tmp_path).cluster == "west"


@pytest.mark.parametrize(
    "removed", ["max_body_bytes: 1MiB", "breaker_failures: 3", "discovery: {names: [a:1]}", "fetch_timeout: 1s"]
)
def test_removed_settings_are_accepted_with_a_warning(removed: str, tmp_path: Path) -> None:
    with pytest.warns(FutureWarning, match="this setting was removed"):
        _load(f"{removed}\n{GOOD}", tmp_path)


TLS = "tls: {authority: a.pem, certificate: c.pem, key: k.pem}\n"


@pytest.mark.parametrize(
    ("text", "is_refused"),
    [
        (GOOD, False),
        (TLS + GOOD, True),
        (TLS + GOOD.replace("http://10.0.2.1", "https://10.0.2.1"), False),
        (TLS + GOOD.replace("http://10.0.2.1", "http://127.0.0.1"), False),
        (TLS + "insecure_plaintext: true\n" + GOOD, False),
        (TLS + "cluster: west\n" + GOOD, True),
    ],
)
def test_prompts_do_not_cross_between_clusters_unencrypted_beside_tls(
    text: str, is_refused: bool, tmp_path: Path
) -> None:
    if not is_refused:
        _load(text, tmp_path)
        return
    with pytest.raises(ConfigError, match=r"clusters: http://10\.0\.2\.1:8000 of e .*insecure_plaintext"):
        _load(text, tmp_path)
