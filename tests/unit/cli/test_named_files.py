"""A check of settings reads the files that they name, and tells of each that cannot be used with file, line and key."""

from pathlib import Path
from typing import Any

import pytest

from prfaas import config
from prfaas.agent.config import AgentConfig
from prfaas.cli.component import check_named_files
from prfaas.colocate.config import ColocateConfig
from prfaas.console.authority import Authority
from prfaas.console.config import ConsoleConfig
from prfaas.errors import ConfigError
from prfaas.manager.config import ManagerConfig
from prfaas.router.config import RouterConfig
from prfaas.router.sidecar.config import SidecarConfig
from tests.support.secret_files import write_deployment_secret, write_secret

KEYS = ("authority", "certificate", "key", "revocations")
CERTIFICATES = "tls:\n  authority: {0}/authority.pem\n  certificate: {0}/own.pem\n  key: {0}/own.key\n"


@pytest.mark.parametrize(
    ("component", "cls", "text", "named"),
    [
        ("manager", ManagerConfig, "local_policy: ppd\nppd_table: {0}/none.json\n", "line 2: ppd_table: .*none.json"),
        ("manager", ManagerConfig, "local_policy: ppd\nppd_table: {0}/text\n", "line 2: ppd_table: .*text"),
        (
            "manager",
            ManagerConfig,
            "local_policy: endpoint_picker\nendpoint_picker: {0}/text\n",
            "line 2: endpoint_picker: .*text: .*EndpointPickerConfig",
        ),
        (
            "manager",
            ManagerConfig,
            "redis_url: http://foo:1\n",
            "line 1: redis_url: .*http.* not a supported scheme; write redis://",
        ),
        ("manager", ManagerConfig, "deployment: {0}/none.yaml\n", "line 1: deployment: .*none.yaml"),
        ("router", RouterConfig, "managers: [m:1]\napi_keys_file: {0}/none\n", "line 2: api_keys_file: .*none"),
        ("router", RouterConfig, "operator_keys_file: {0}/empty\nmanagers: [m:1]\n", "line 1: operator_keys_file:"),
        ("router", RouterConfig, "managers: [m:1]\nengine_api_key_file: {0}/none\n", "line 2: engine_api_key_file:"),
        (
            "sidecar",
            SidecarConfig,
            "prefill_hosts: [10.0.0.0/99]\n",
            "line 1: prefill_hosts: 10.0.0.0/99 is no network",
        ),
        ("colocate", ColocateConfig, "model: m\nprofile: {0}/none\n", "line 2: profile: .*none: cannot"),
        ("console", ConsoleConfig, CERTIFICATES, "line 3: tls.certificate: .*own.pem"),
        ("console", ConsoleConfig, "router_key_file: {0}/none\n", "line 1: router_key_file:"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_its_place(
    component: str, cls: type[Any], text: str, named: str, tmp_path: Path
) -> None:
    Authority(tmp_path)
    (tmp_path / "text").write_text("some text")
    write_secret(tmp_path / "empty", "")
    write_deployment_secret(tmp_path)
    file = tmp_path / "settings.yaml"
    needs_secret = cls in (ManagerConfig, RouterConfig)
    file.write_text(text.format(tmp_path) + (f"secret_file: {tmp_path}/secret\n" if needs_secret else ""))
    config.load(cls, component=component, file=file, environment={})
    with pytest.raises(ConfigError, match=f"settings.yaml {named}"):
        config.load(cls, component=component, file=file, environment={}, check=check_named_files)


@pytest.mark.parametrize(
    ("key", "spoilt", "named"),
    [
        *((key, "absent", f"{key}: .*absent cannot be used: No such file or directory") for key in KEYS),
        ("authority", "text", "authority: .*text cannot be used"),
        ("certificate", "text", "certificate: "),
        ("revocations", "text", "revocations: .*text cannot be used"),
    ],
)
@pytest.mark.parametrize(
    ("component", "cls", "prefix", "others"),
    [
        ("agent", AgentConfig, "tls", "name: a\nsecret_file: {0}/secret\n"),
        ("manager", ManagerConfig, "tls", "secret_file: {0}/secret\n"),
        ("router", RouterConfig, "tls", "managers: [m:1]\nsecret_file: {0}/secret\n"),
        ("router", RouterConfig, "client_tls", "managers: [m:1]\nsecret_file: {0}/secret\n"),
        ("sidecar", SidecarConfig, "tls", ""),
        ("colocate", ColocateConfig, "tls", ""),
    ],
)
def test_of_certificates_the_file_that_cannot_be_used_is_named(
    component: str, cls: type[Any], prefix: str, others: str, key: str, spoilt: str, named: str, tmp_path: Path
) -> None:
    write_deployment_secret(tmp_path)
    (tmp_path / "text").write_text("some text")
    issued = Authority(tmp_path).issue("own")
    paths = {name: getattr(issued, name) for name in KEYS} | {key: tmp_path / spoilt}
    text = others.format(tmp_path) + f"{prefix}:\n" + "".join(f"  {name}: {path}\n" for name, path in paths.items())
    line = text[: text.index(f"  {key}:")].count("\n") + 1
    (tmp_path / "settings.yaml").write_text(text)
    refusal = f"settings.yaml line {line}: {prefix}.{named}"
    with pytest.raises(ConfigError, match=refusal):
        config.load(cls, component=component, file=tmp_path / "settings.yaml", environment={}, check=check_named_files)
