"""The Kubernetes manifests: of the API's schemas, strictly; their selectors meet; components take their settings."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.integration.deploy.settings_of import component_of, settings_of
from tools.reference_tables import ROOT

DIRECTORY = ROOT / "deploy/kubernetes"
KUSTOMIZATION = yaml.safe_load((DIRECTORY / "kustomization.yaml").read_text())
OBJECTS: list[dict[str, Any]] = [
    item for name in KUSTOMIZATION["resources"] for item in yaml.safe_load_all((DIRECTORY / name).read_text())
]
NAMED = [pytest.param(item, id=f"{item['kind']}/{item['metadata']['name']}") for item in OBJECTS]
BUILT_IN = [param for param in NAMED if param.values[0]["kind"] != "ServiceMonitor"]  # type: ignore[index]
VERSIONS = ("1.33", "1.37")


def of_kind(*kinds: str) -> list[dict[str, Any]]:
    return [item for item in OBJECTS if item["kind"] in kinds]


def service_links() -> dict[str, str]:
    """Return the variables of Services that Kubernetes adds to pods unless `enableServiceLinks` is false."""
    addressed = [item for item in of_kind("Service") if item["spec"].get("clusterIP") != "None"]
    names = [item["metadata"]["name"].upper().replace("-", "_") for item in addressed]
    kinds = ("SERVICE_HOST", "SERVICE_PORT", "PORT", "PORT_80_TCP", "PORT_80_TCP_ADDR")
    return {f"{name}_{kind}": "10.96.0.1" for name in names for kind in kinds}


def workloads() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Name, pod template and container of everything that runs."""
    for item in of_kind("Deployment", "StatefulSet", "DaemonSet"):
        template = item["spec"]["template"]
        for container in template["spec"]["containers"]:
            yield item["metadata"]["name"], template, container


def environment_of(pod: Mapping[str, Any], container: Mapping[str, Any], shared: Mapping[str, str]) -> dict[str, str]:
    """As a pod on a node "node-1" at 10.0.1.1 would have it."""
    fields = {"spec.nodeName": "node-1", "status.hostIP": "10.0.1.1", "metadata.name": "pod-0"}
    found = service_links() if pod.get("enableServiceLinks", True) else {}
    found |= shared if "envFrom" in container else {}
    for variable in container.get("env", []):
        value = variable.get("value") or fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
        found[variable["name"]] = re.sub(r"\$\((\w+)\)", lambda match: found[match[1]], value)
    return found


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("manifest", BUILT_IN)
def test_a_manifest_is_of_the_api_s_schema(manifest: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(manifest, version, strict=True)


def test_an_unknown_field_is_not() -> None:
    wrong = copy.deepcopy(of_kind("DaemonSet")[0])
    wrong["spec"]["replicas"] = 2
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


def test_every_kind_that_a_deployment_needs_is_there() -> None:
    wanted = {"Deployment", "StatefulSet", "DaemonSet", "NetworkPolicy", "PodDisruptionBudget", "ServiceMonitor"}
    assert wanted <= {item["kind"] for item in OBJECTS}


def test_kustomize_takes_the_directory() -> None:
    if not shutil.which("kubectl"):
        pytest.skip("needs kubectl")
    built = subprocess.run(
        ["kubectl", "kustomize", str(DIRECTORY)], capture_output=True, text=True, timeout=150, check=True
    )
    objects = list(yaml.safe_load_all(built.stdout))
    assert len(objects) == len(OBJECTS)
    assert {item["metadata"]["namespace"] for item in objects} == {"prfaas"}
    assert "image: prfaas\n" not in built.stdout


@pytest.mark.parametrize(
    ("name", "template", "container"), tuple(workloads()), ids=lambda item: item if isinstance(item, str) else ""
)
def test_what_runs_may_do_nothing_but_its_work(name: str, template: dict[str, Any], container: dict[str, Any]) -> None:
    pod, own = template["spec"]["securityContext"], container["securityContext"]
    assert pod["runAsNonRoot"] and pod["seccompProfile"]["type"] == "RuntimeDefault"
    assert (
        not own["allowPrivilegeEscalation"]
        and own["readOnlyRootFilesystem"]
        and own["capabilities"] == {"drop": ["ALL"]}
    )
    assert template["spec"]["automountServiceAccountToken"] is False
    assert template["spec"]["enableServiceLinks"] is False
    assert "limits" in container["resources"] and "readinessProbe" in container


def test_every_component_takes_its_environment() -> None:
    shared = of_kind("ConfigMap")[0]["data"]
    found = {}
    for _, template, container in workloads():
        component = component_of(container.get("command", []))
        if component:
            found[component] = settings_of(component, environment_of(template["spec"], container, shared))
    assert set(found) == {"agent", "manager", "router"}
    agent = found["agent"]
    assert (agent.name, agent.listen, agent.engines[0].url) == ("node-1", "10.0.1.1:7400", "http://10.0.1.1:8000")
    assert found["manager"].advertise == "pod-0.prfaas-managers:7410"
    used = {name for name in shared if any(name.startswith(f"PRFAAS_{item.upper()}_") for item in found)}
    assert used == set(shared), "every shared setting is somebody's"


def _matches(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    return selector.items() <= labels.items()


@pytest.mark.parametrize(
    "kind", ["Service", "PodDisruptionBudget", "NetworkPolicy", "Deployment", "StatefulSet", "DaemonSet"]
)
def test_every_selector_meets_pods(kind: str) -> None:
    labels = [template["metadata"]["labels"] for _, template, _ in workloads()]
    for item in of_kind(kind):
        spec = item["spec"]
        found = spec.get("podSelector", spec.get("selector"))
        assert any(_matches(found.get("matchLabels", found), pod) for pod in labels), item["metadata"]["name"]


def test_the_monitor_finds_the_pages_of_managers_and_routers() -> None:
    found = {}
    for monitor in (item["spec"] for item in of_kind("ServiceMonitor")):
        (endpoint,) = monitor["endpoints"]
        assert endpoint["port"] == "http"
        for service in of_kind("Service"):
            if _matches(monitor["selector"]["matchLabels"], service["metadata"]["labels"]):
                assert "http" in [port["name"] for port in service["spec"]["ports"]]
                found[service["metadata"]["name"]] = endpoint.get("authorization", {}).get("credentials")
    assert found == {"prfaas-managers": None, "prfaas-router": {"name": "prfaas-api-keys", "key": "operator-key"}}


def test_managers_are_reached_under_the_names_that_settings_use() -> None:
    managers = next(item for item in of_kind("StatefulSet") if item["metadata"]["name"] == "prfaas-manager")
    names = [
        f"prfaas-manager-{number}.{managers['spec']['serviceName']}:7410"
        for number in range(managers["spec"]["replicas"])
    ]
    shared = of_kind("ConfigMap")[0]["data"]
    assert shared["PRFAAS_ROUTER_MANAGERS"].split(",") == shared["PRFAAS_AGENT_MANAGERS"].split(",") == names


def test_the_pool_fits_into_the_agent_s_memory() -> None:
    template, container = next((pod, item) for name, pod, item in workloads() if name == "prfaas-agent")
    environment = environment_of(template["spec"], container, of_kind("ConfigMap")[0]["data"])
    limit = int(container["resources"]["limits"]["memory"].removesuffix("Gi")) << 30
    assert settings_of("agent", environment).pool_bytes <= limit * 0.95
