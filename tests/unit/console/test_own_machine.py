"""The console takes addresses and keys from the settings files of this machine's components."""

from dataclasses import replace
from pathlib import Path

from prfaas.console.config import ConsoleConfig
from prfaas.console.own_machine import beside_components

ROUTER = "listen: 10.0.1.1:8080\nsecret_file: s\napi_keys_file: k\noperator_keys_file: /etc/prfaas/operator-key\n"


def test_a_router_without_managers_is_asked_at_its_address_with_its_operator_key(tmp_path: Path) -> None:
    instance = '{name: w, url: "http://10.0.1.1:8000", role: both, agent: w, wire: "10.0.1.1:7400"}'
    (tmp_path / "router.yaml").write_text(f"{ROUTER}clusters: [{{name: west, kind: pd, instances: [{instance}]}}]")
    found = beside_components(ConsoleConfig(), tmp_path)
    assert found.routers == ("http://10.0.1.1:8080",)
    assert found.router_key_file == Path("/etc/prfaas/operator-key")
    assert found.managers == ()


def test_managers_are_those_of_the_router_unless_one_runs_here(tmp_path: Path) -> None:
    (tmp_path / "router.yaml").write_text(ROUTER + 'managers: ["10.0.1.1:7410"]')
    assert beside_components(ConsoleConfig(), tmp_path).managers == ("10.0.1.1:7410",)
    (tmp_path / "manager.yaml").write_text(
        "secret_file: s\nlisten: 0.0.0.0:7500\nhttp_listen: 127.0.0.1:7501\ninsecure_plaintext: true"
    )
    found = beside_components(ConsoleConfig(), tmp_path)
    assert (found.managers, found.pages) == (("127.0.0.1:7500",), ("http://127.0.0.1:7501",))


def test_settings_of_the_operator_and_unusable_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "router.yaml").write_text("no: router")
    assert beside_components(ConsoleConfig(), tmp_path) == ConsoleConfig()
    (tmp_path / "router.yaml").write_text(ROUTER + 'managers: ["10.0.1.1:7410"]')
    own = replace(ConsoleConfig(), routers=("http://r:1",), managers=("m:1",), router_key_file=Path("own"))
    assert beside_components(own, tmp_path) == replace(own, secret_file=Path("s"))
