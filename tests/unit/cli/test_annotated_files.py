"""The annotated files start with lines uncommented, and with those filled in beside which others mean something or nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from prfaas import config
from prfaas.cli import named_files
from prfaas.console.authority import Authority
from tools.reference_tables import COMPONENTS, ROOT

MANAGERS = ("managers: []", "managers: [m:1]")
TLS = tuple((f"tls_{name}:", f"tls_{name}: {{0}}/its.{end}") for name, end in (("certificate", "pem"), ("key", "key")))
MUTUAL_TLS = (("tls_authority:", "tls_authority: {0}/authority.pem"), *TLS)
CLIENT_TLS = tuple((f"client_{old}", f"client_{new}") for old, new in TLS)
FILLED_IN = [
    ("agent", MUTUAL_TLS),
    ("manager", MUTUAL_TLS),
    ("manager", (("deployment:", f"deployment: {ROOT}/examples/solver/deployment.yaml"),)),
    (
        "manager",
        (
            ("redis_url:", "redis_url: redis://127.0.0.1"),
            ("redis_directory: /var/lib/prfaas/redis", "redis_directory:"),
        ),
    ),
    ("manager", (("bandwidth: scarce", "bandwidth: abundant"),)),
    ("manager", (("local_policy: decode", "local_policy: suffix"),)),
    ("manager", (("local_policy: decode", "local_policy: static"),)),
    ("router", (MANAGERS,)),
    ("router", (MANAGERS, *MUTUAL_TLS)),
    ("router", CLIENT_TLS),
    ("sidecar", (("protocol: nixl", "protocol: prfaas"),)),
    ("sidecar", MUTUAL_TLS),
    ("colocate", (("agent_socket:", "agent_socket: /run/prfaas/agent.sock"),)),
    ("colocate", MUTUAL_TLS),
    ("console", MUTUAL_TLS),
    *((component, ()) for component in COMPONENTS),
]


@pytest.mark.parametrize("uncommented", [False, True])
@pytest.mark.parametrize(("component", "lines"), FILLED_IN)
def test_an_annotated_file_starts_with_its_lines_uncommented_and_filled_in(
    component: str, lines: tuple[tuple[str, str], ...], uncommented: bool, tmp_path: Path
) -> None:
    Authority(tmp_path).issue("its")
    (tmp_path / "secret").write_bytes(bytes(32))
    (tmp_path / "secret").chmod(0o600)
    text = (ROOT / f"deploy/{component}.yaml").read_text().replace("/etc/prfaas/secret", f"{tmp_path}/secret")
    if MANAGERS in lines:  # Managers announce the clusters.
        text, num_blocks = re.subn(r"^clusters:\n(?:  .*\n)+", "clusters: []\n", text, flags=re.MULTILINE)
        assert num_blocks == 1
    for old, new in lines:
        assert len(re.findall(rf"^{re.escape(old)}$", text, re.MULTILINE)) == 1, old
        text = re.sub(rf"^{re.escape(old)}$", new.format(tmp_path), text, flags=re.MULTILINE)
    for path, item in config.paths(COMPONENTS[component]) if uncommented else ():
        if item.only_where:
            text, num_lines = re.subn(rf"^( *)(?:# )?({path[-1]}:)( |$)", r"\1\2\3", text, flags=re.MULTILINE)
            assert num_lines == 1, path
    (tmp_path / "settings.yaml").write_text(text)
    config.load(
        COMPONENTS[component],
        component=component,
        file=tmp_path / "settings.yaml",
        environment={},
        check=named_files.check,
    )


def test_the_manager_s_record_lies_where_its_unit_lets_it_write_and_keeps_it() -> None:
    unit = (ROOT / "deploy/systemd/prfaas-manager.service").read_text()
    kept = re.search(r"^StateDirectory=(\S+)$", unit, re.MULTILINE)
    named = re.search(r"^redis_directory: (\S+)$", (ROOT / "deploy/manager.yaml").read_text(), re.MULTILINE)
    assert kept and named and Path(named[1]).is_relative_to(f"/var/lib/{kept[1]}")
