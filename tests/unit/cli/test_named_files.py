"""A check of settings reads the files that they name, and tells of each that cannot be used with file, line and key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prfaas import config
from prfaas.cli import named_files
from prfaas.console.config import ConsoleConfig
from prfaas.errors import ConfigError
from prfaas.manager.config import ManagerConfig
from prfaas.router.config import RouterConfig
from prfaas.router.sidecar.config import SidecarConfig

CERTIFICATES = "tls_authority: {0}/ca.pem\ntls_certificate: {0}/its.pem\ntls_key: {0}/its.key\n"


@pytest.mark.parametrize(
    ("component", "cls", "text", "named"),
    [
        ("manager", ManagerConfig, "local_policy: ppd\nppd_table: {0}/none.json\n", "line 2: ppd_table: .*none.json"),
        ("manager", ManagerConfig, "local_policy: ppd\nppd_table: {0}/text\n", "line 2: ppd_table: .*text"),
        (
            "manager",
            ManagerConfig,
            "endpoint_picker: {0}/text\nlocal_policy: endpoint_picker\n",
            "line 1: .*text: .*EndpointPickerConfig",
        ),
        ("manager", ManagerConfig, "deployment: {0}/none.yaml\n", "line 1: deployment: .*none.yaml"),
        ("router", RouterConfig, "managers: [m:1]\napi_keys_file: {0}/none\n", "line 2: api_keys_file: .*none"),
        ("router", RouterConfig, "operator_keys_file: {0}/empty\nmanagers: [m:1]\n", "line 1: operator_keys_file:"),
        ("router", RouterConfig, "managers: [m:1]\nengine_api_key_file: {0}/none\n", "line 2: engine_api_key_file:"),
        ("router", RouterConfig, "managers: [m:1]\n" + CERTIFICATES, "line 3: tls_certificate: .*its.pem"),
        ("sidecar", SidecarConfig, CERTIFICATES, "line 2: tls_certificate: .*its.pem"),
        ("console", ConsoleConfig, "router_key_file: {0}/none\n", "line 1: router_key_file:"),
        ("console", ConsoleConfig, CERTIFICATES, "line 2: tls_certificate: .*its.pem"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_its_place(
    component: str, cls: type[Any], text: str, named: str, tmp_path: Path
) -> None:
    (tmp_path / "text").write_text("some text")
    (tmp_path / "empty").write_text("")
    (tmp_path / "secret").write_bytes(bytes(32))
    (tmp_path / "secret").chmod(0o600)
    file = tmp_path / "settings.yaml"
    needs_secret = cls in (ManagerConfig, RouterConfig)
    file.write_text(text.format(tmp_path) + (f"secret_file: {tmp_path}/secret\n" if needs_secret else ""))
    config.load(cls, component=component, file=file, environment={})
    with pytest.raises(ConfigError, match=f"settings.yaml {named}"):
        config.load(cls, component=component, file=file, environment={}, check=named_files.check)
