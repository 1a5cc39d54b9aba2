"""Kustomize's own build of the overlays: certificates at every port, and a second datacenter that finds the first."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import kubernetes_validate
import pytest
import yaml

from prfaas import config
from prfaas.console.config import ConsoleConfig
from tests.integration.deploy.settings_of import component_of, settings_of
from tests.integration.deploy.test_kubernetes import OBJECTS, VERSIONS, environment_of
from tools.reference_tables import ROOT

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
OVERLAYS = ("kubernetes-tls", "kubernetes-second")
TLS = Path("/etc/prfaas-tls")


@cache
def built(overlay: str) -> list[dict[str, Any]]:
    command = ["kubectl", "kustomize", str(ROOT / "deploy" / overlay)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=True)
    return list(yaml.safe_load_all(done.stdout))


def environments(overlay: str) -> dict[str, dict[str, str]]:
    """Return the settings of each component, as the container has them."""
    (shared,) = (item["data"] for item in built(overlay) if item["kind"] == "ConfigMap")
    found = {}
    for item in built(overlay):
        for container in item["spec"]["template"]["spec"]["containers"] if "template" in item.get("spec", {}) else ():
            if component := component_of(container.get("command", [])):
                found[component] = environment_of(item["spec"]["template"]["spec"], container, shared)
    return found


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_kustomize_builds_is_of_the_api_s_schemas(overlay: str, version: str) -> None:
    for item in built(overlay):
        if item["kind"] != "ServiceMonitor":
            kubernetes_validate.validate(item, version, strict=True)


def test_every_component_shows_a_certificate_that_its_pod_has_and_none_speaks_plain_text() -> None:
    mounted = {}
    for item in built("kubernetes-tls"):
        for container in item["spec"]["template"]["spec"]["containers"] if "template" in item.get("spec", {}) else ():
            if component := component_of(container.get("command", [])):
                mounted[component] = {Path(mount["mountPath"]) for mount in container["volumeMounts"]}
    for component, environment in environments("kubernetes-tls").items():
        settings = settings_of(component, environment)
        files = {settings.tls.authority, settings.tls.certificate, settings.tls.key}
        assert {path.parent for path in files} == {TLS} <= mounted[component], component
        assert not settings.insecure_plaintext
    assert settings_of("agent", environments("kubernetes-tls")["agent"]).tls.certificate == TLS / "node-1.pem"


def test_the_probes_of_managers_show_the_manager_s_certificate() -> None:
    environment = environments("kubernetes-tls")["manager"]
    console = config.load(ConsoleConfig, component="console", environment=environment)
    assert console.pages == ("https://127.0.0.1:7411",)
    assert console.tls.certificate == settings_of("manager", environment).tls.certificate
    managers = _named("prfaas-manager", "StatefulSet")
    (container,) = managers["spec"]["template"]["spec"]["containers"]
    commands = {"readinessProbe": ["prfaas", "status", "--ready"], "livenessProbe": ["prfaas", "status"]}
    for probe, command in commands.items():
        assert container[probe]["exec"] == {"command": command} and "httpGet" not in container[probe]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_engines_are_asked_over_tls_with_the_deployment_s_certificates(overlay: str) -> None:
    agent = settings_of("agent", environments(overlay)["agent"])
    assert [engine.url for engine in agent.engines] == ["https://10.0.1.1:8000"]
    assert agent.engine_tls == "deployment"


def test_routers_show_engines_the_deployment_s_certificates() -> None:
    assert settings_of("router", environments("kubernetes-tls")["router"]).engine_tls == "deployment"


def test_managers_reach_redis_over_mutual_tls_alone() -> None:
    manager = settings_of("manager", environments("kubernetes-tls")["manager"])
    url = urlsplit(manager.redis_url)
    service, redis = (_named("prfaas-redis", kind) for kind in ("Service", "StatefulSet"))
    (port,) = service["spec"]["ports"]
    assert (url.scheme, url.hostname, url.port) == ("rediss", service["metadata"]["name"], port["port"])
    files = {
        "ssl_ca_certs": manager.tls.authority,
        "ssl_certfile": manager.tls.certificate,
        "ssl_keyfile": manager.tls.key,
    }
    assert dict(parse_qsl(url.query)) == {name: str(path) for name, path in files.items()}
    pod = redis["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    options = dict(zip(container["args"][1::2], container["args"][2::2], strict=True))
    assert (options["--port"], options["--tls-port"]) == ("0", str(container["ports"][0]["containerPort"]))
    assert options["--tls-auth-clients"] == "yes"
    shown = [options[f"--tls-{name}-file"] for name in ("ca-cert", "cert", "key")]
    assert {Path(path).parent for path in shown} == {TLS}
    assert TLS in {Path(mount["mountPath"]) for mount in container["volumeMounts"]}
    assert set(shown) < set(container["readinessProbe"]["exec"]["command"])
    plain = next(
        item for item in OBJECTS if item["kind"] == "StatefulSet" and item["metadata"]["name"] == "prfaas-redis"
    )
    (without,) = plain["spec"]["template"]["spec"]["containers"]
    assert container["args"][: len(without["args"])] == without["args"], "the same Redis otherwise"


def _named(name: str, kind: str) -> dict[str, Any]:
    (found,) = (item for item in built("kubernetes-tls") if (item["metadata"]["name"], item["kind"]) == (name, kind))
    return found


def test_managers_are_reached_from_outside_under_the_names_that_they_tell() -> None:
    objects = built("kubernetes-tls")
    pods = {item["spec"]["selector"].get("statefulset.kubernetes.io/pod-name") for item in objects if _is_outside(item)}
    assert pods == {"prfaas-manager-0", "prfaas-manager-1"}
    told = settings_of("manager", environments("kubernetes-tls")["manager"]).advertise
    asked = settings_of("agent", environments("kubernetes-tls")["agent"]).managers
    assert asked == tuple(told.replace("pod-0", pod) for pod in sorted(pods))


def _is_outside(rule: dict[str, Any]) -> bool:
    return bool(rule["kind"] == "Service" and rule["spec"].get("type") == "LoadBalancer")


def test_the_second_datacenter_has_agents_alone_that_go_to_the_first_one_s_managers() -> None:
    kinds = {item["kind"] for item in built("kubernetes-second")}
    assert kinds == {"ConfigMap", "DaemonSet", "NetworkPolicy"}
    (component,) = environments("kubernetes-second")
    agent = settings_of(component, environments("kubernetes-second")[component])
    first = settings_of("agent", environments("kubernetes-tls")["agent"])
    assert (agent.cluster, agent.cluster_kind, agent.managers) == ("east", "prfaas", first.managers)
    assert agent.cluster != first.cluster
