"""The annotated files start with lines uncommented, and with those filled in beside which others mean something or nothing."""

import re
from pathlib import Path

import pytest

from prfaas import config
from prfaas.cli.component import check_named_files
from prfaas.config_checks import ABSENT
from prfaas.console.authority import Authority
from tests.support.secret_files import write_deployment_secret
from tools.reference_tables import COMPONENTS, ROOT

MANAGERS = {"managers": "[m:1]"}
TLS = {"tls.authority": "{0}/authority.pem", "tls.certificate": "{0}/own.pem", "tls.key": "{0}/own.key"}
CLIENT_TLS = {"client_tls.certificate": "{0}/own.pem", "client_tls.key": "{0}/own.key"}
FILLED_IN: list[tuple[str, dict[str, str]]] = [
    ("agent", TLS),
    ("manager", TLS),
    ("manager", {"deployment": f"{ROOT}/examples/solver/deployment.yaml"}),
    ("manager", {"redis_url": "redis://127.0.0.1", "redis_directory": ""}),
    ("manager", {"bandwidth": "abundant"}),
    ("manager", {"local_policy": "static"}),
    ("router", MANAGERS),
    ("router", MANAGERS | TLS),
    ("router", CLIENT_TLS),
    ("sidecar", {"protocol": "prfaas"}),
    ("sidecar", TLS),
    ("colocate", {"agent_socket": "/run/prfaas/agent.sock"}),
    ("colocate", TLS),
    ("console", TLS),
    *((component, {}) for component in COMPONENTS),
]


def _uncommented(text: str, path: tuple[str, ...], value: str | None = None) -> str:
    """Return the file with the line of one setting uncommented, and filled in unless `value` is None."""
    *outer, key = path
    record = "".join(rf"^{name}:\n(?:(?:  .*)?\n)*?" for name in outer) or "^"
    pattern = rf"({record}{'  ' * len(outer)})(?:# )?({key}:)(.*)$"
    text, num_lines = re.subn(
        pattern, lambda line: line[1] + line[2] + (line[3] if value is None else f" {value}"), text, flags=re.MULTILINE
    )
    assert num_lines == 1, path
    return text


@pytest.mark.parametrize("uncommented", [False, True])
@pytest.mark.parametrize(("component", "values"), FILLED_IN)
def test_an_annotated_file_starts_with_its_lines_uncommented_and_filled_in(
    component: str, values: dict[str, str], uncommented: bool, tmp_path: Path
) -> None:
    Authority(tmp_path).issue("own")
    write_deployment_secret(tmp_path)
    text = (ROOT / f"deploy/{component}.yaml").read_text().replace("/etc/prfaas/secret", f"{tmp_path}/secret")
    if "managers" in values:  # Managers announce the clusters.
        text, num_blocks = re.subn(r"^clusters:\n(?:  .*\n)+", "clusters: []\n", text, flags=re.MULTILINE)
        assert num_blocks == 1
    for dotted, value in values.items():
        text = _uncommented(text, tuple(dotted.split(".")), value.format(tmp_path))
    for path, item in config.paths(COMPONENTS[component]) if uncommented else ():
        is_overruled = "managers" in values and "managers" in item.only_where and ABSENT in item.only_where.values()
        if item.only_where and not is_overruled:
            text = _uncommented(text, path)
    (tmp_path / "settings.yaml").write_text(text)
    config.load(
        COMPONENTS[component],
        component=component,
        file=tmp_path / "settings.yaml",
        environment={},
        check=check_named_files,
    )


def test_the_manager_s_record_lies_where_its_unit_lets_it_write_and_keeps_it() -> None:
    unit = (ROOT / "deploy/systemd/prfaas-manager.service").read_text()
    kept = re.search(r"^StateDirectory=(\S+)$", unit, re.MULTILINE)
    named = re.search(r"^redis_directory: (\S+)$", (ROOT / "deploy/manager.yaml").read_text(), re.MULTILINE)
    assert kept and named and Path(named[1]).is_relative_to(f"/var/lib/{kept[1]}")
