"""The container file and the compose file: linted, of the specification's form, and with settings that components take."""

import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema

from prfaas.router.config import RouterConfig
from prfaas.router.sidecar.server import REQUEST_SECONDS
from prfaas.units import is_loopback, split_address
from tests.integration.deploy.settings_of import component_of, rendered, settings_of
from tools.reference_tables import ROOT

CONTAINERFILE = ROOT / "deploy/container/Containerfile"
COMPOSE = ROOT / "deploy/compose.yaml"
COMPOSE_TLS = ROOT / "deploy/compose-tls.yaml"  # Overlay of COMPOSE.
BIN = Path(sys.executable).parent
SERVICES = yaml.safe_load(rendered(COMPOSE.read_text()))["services"]
OURS = sorted(name for name, item in SERVICES.items() if component_of(item.get("command", [])))


def run(*line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(line, capture_output=True, text=True, timeout=150, check=False)


def test_the_linter_finds_nothing_in_the_container_file() -> None:
    linted = run(str(BIN / "hadolint"), "--failure-threshold=style", str(CONTAINERFILE))
    assert (linted.returncode, linted.stdout) == (0, "")


def test_the_container_is_built_without_secrets_and_runs_as_nobody_special() -> None:
    lines = CONTAINERFILE.read_text().splitlines()
    words = {line.split()[0] for line in lines if re.match(r"[A-Z]+ ", line)}
    assert not words & {"ARG", "ADD", "EXPOSE"}
    assert "--mount=type=secret" not in CONTAINERFILE.read_text()
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users == ["10001:10001"]
    assert lines.index("USER 10001:10001") > max(n for n, line in enumerate(lines) if line.startswith(("RUN", "COPY")))


def test_what_the_container_file_copies_is_there_and_not_ignored() -> None:
    copies = [line.split()[1:-1] for line in CONTAINERFILE.read_text().splitlines() if re.match(r"COPY [^-]", line)]
    sources = [source for copy in copies for source in copy]
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert sources and all((ROOT / source).exists() for source in sources)
    assert not set(sources) & set(ignored)
    secrets = {f"deploy/{item['file']}" for item in yaml.safe_load(COMPOSE.read_text())["secrets"].values()}
    secrets = {secret.replace("/./", "/") for secret in secrets} | {"deploy/tls"}
    assert secrets <= set(ignored) and secrets <= set((ROOT / ".gitignore").read_text().split())


def test_stopped_routers_and_sidecars_have_time_for_the_longest_answer() -> None:
    unit = (ROOT / "deploy/systemd/prfaas-router.service").read_text()
    values = yaml.safe_load((ROOT / "deploy/helm/values.yaml").read_text())
    graces = [re.findall(r"TimeoutStopSec=(\d+)", unit)[0], values["router"]["graceSeconds"]]
    graces.append(SERVICES["router"]["stop_grace_period"].removesuffix("s"))
    assert min(map(int, graces)) > RouterConfig.request_timeout
    pod = yaml.safe_load((ROOT / "deploy/llm-d/sidecar.yaml").read_text())["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > REQUEST_SECONDS


@pytest.mark.parametrize("file", [COMPOSE, COMPOSE_TLS], ids=lambda file: file.stem)
def test_a_compose_file_is_of_the_specification_s_form(file: Path) -> None:
    schema = get_builtin_schema("vendor.compose-spec")
    jsonschema.validate(yaml.safe_load(file.read_text()), schema)


@pytest.mark.parametrize("service", OURS)
def test_a_service_s_environment_is_taken_by_its_component(service: str) -> None:
    item = SERVICES[service]
    settings = settings_of(service, item["environment"])
    assert str(settings.secret_file) == "/run/secrets/secret"
    assert is_loopback(split_address(settings.listen)[0]), "nothing beyond loopback unless told"
    assert item["read_only"] and item["cap_drop"] == ["ALL"]


def test_others_reach_what_is_told_to_be_reached() -> None:
    told = {"ADDRESS": "10.0.1.1", "MANAGER_LISTEN": "10.0.1.1:7410", "ROUTER_LISTEN": "10.0.1.1:80"}
    services = yaml.safe_load(rendered(COMPOSE.read_text(), **told, MANAGER_INSECURE_PLAINTEXT="true"))["services"]
    found = {name: settings_of(name, services[name]["environment"]) for name in OURS}
    assert (found["agent"].listen, found["agent"].engines[0].url) == ("10.0.1.1:7400", "http://10.0.1.1:8000")
    assert "--host=10.0.1.1" in services["engine"]["command"]
    assert found["manager"].insecure_plaintext and found["manager"].listen == "10.0.1.1:7410"
    keys = found["router"].api_keys_file
    assert found["router"].listen == "10.0.1.1:80" and keys.name in [
        service["target"] for service in services["router"]["secrets"]
    ]


def test_with_tls_every_component_listens_beyond_loopback_with_certificates_alone() -> None:
    told = {"ADDRESS": "8.8.8.8", "MANAGER_LISTEN": "8.8.8.8:7410", "ROUTER_LISTEN": "8.8.8.8:443", "NODE": "west-7"}
    plain, over = (yaml.safe_load(rendered(file.read_text(), **told))["services"] for file in (COMPOSE, COMPOSE_TLS))
    found = {name: settings_of(name, plain[name]["environment"] | over[name]["environment"]) for name in OURS}
    for name, settings in found.items():
        assert not settings.insecure_plaintext and settings.tls.revocations
        files = (settings.tls.authority, settings.tls.certificate, settings.tls.key)
        own = "west-7" if name == "agent" else name
        assert [file.name for file in files] == ["authority.pem", f"{own}.pem", f"{own}.key"]
        assert over[name]["volumes"] == [f"./tls/{own}:/tls:ro"], "its own key alone"
    assert found["router"].client_tls.certificate.name == "router.pem"
    assert found["router"].engine_tls == found["agent"].engine_tls == "deployment"
    assert found["agent"].engines[0].url == "https://8.8.8.8:8000"
    *command, certificate, key, authority, asks = over["engine"]["command"]
    assert command == plain["engine"]["command"], "what takes its place says the same, and these"
    assert (certificate, key) == ("--ssl-certfile=/tls/west-7.pem", "--ssl-keyfile=/tls/west-7.key")
    assert (authority, asks) == ("--ssl-ca-certs=/tls/authority.pem", "--ssl-cert-reqs=2")
    assert over["engine"]["volumes"] == over["agent"]["volumes"]


def test_what_a_service_writes_is_its_user_s() -> None:
    """Volumes on folders of the image take their owner. Other volumes are chowned before the service starts."""
    (made,) = re.findall(r"install -d -o 10001 .*", CONTAINERFILE.read_text())
    for service in ("agent", "engine"):
        item = SERVICES[service]
        for volume, place in (volume.split(":")[:2] for volume in item["volumes"]):
            givers = [
                name
                for name, item in SERVICES.items()
                if item.get("command") == ["chown", "10001:10001", place] and f"{volume}:{place}" in item["volumes"]
            ]
            waits = {"condition": "service_completed_successfully"}
            assert place in made.split() or [item["depends_on"][name] for name in givers] == [waits], (service, place)
