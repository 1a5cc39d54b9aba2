"""The Helm chart: its objects follow the API's schemas, its selectors match, and components load their settings."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import kubernetes_validate
import pytest
import yaml

from prfaas import config
from prfaas.console.config import ConsoleConfig
from tests.integration.deploy.settings_of import component_of
from tools.helm import HelmUnavailableError, find_helm
from tools.reference_tables import COMPONENTS, ROOT

CHART = ROOT / "deploy/helm"
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
VERSIONS = ("1.33", "1.37")
ISSUER = {"tls": {"issuer": {"name": "prfaas", "kind": "Issuer"}}}
NODES = {"nodeGroups": [{**VALUES["nodeGroups"][0], "nodes": ["node-1", "node-2"]}]}
# Files of values, further values, and the release's name.
INSTALLATIONS: dict[str, tuple[tuple[str, ...], dict[str, Any], str]] = {
    "plain": ((), {"monitoring": {"enabled": True}}, "west"),
    "tls": (("values-tls.yaml",), {"monitoring": {"enabled": True}}, "west"),
    "issued": (("values-tls.yaml",), {**ISSUER, **NODES}, "west"),
    "second": (("values-second.yaml",), {}, "east"),
}
CUSTOM_KINDS = ("ServiceMonitor", "Certificate")
TLS = Path("/etc/prfaas-tls")


@pytest.fixture(scope="session", autouse=True)
def _helm() -> Path:
    try:
        return find_helm()
    except HelmUnavailableError as error:
        pytest.skip(str(error))


def _render(files: tuple[str, ...], values: Mapping[str, Any], release: str = "west") -> str:
    sources = [f"--values={source}" for source in (*(CHART / name for name in files), "-")]
    command = [str(find_helm()), "template", release, str(CHART), *sources]
    done = subprocess.run(command, input=json.dumps(values), capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise ValueError(done.stderr)
    return done.stdout


@cache
def _objects(installation: str) -> tuple[dict[str, Any], ...]:
    files, values, release = INSTALLATIONS[installation]
    return tuple(item for item in yaml.safe_load_all(_render(files, values, release)) if item)


def _of_kind(installation: str, *kinds: str) -> list[dict[str, Any]]:
    return [item for item in _objects(installation) if item["kind"] in kinds]


def _workloads(installation: str) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield the name, pod template and container of everything that runs."""
    for item in _of_kind(installation, "Deployment", "StatefulSet", "DaemonSet"):
        for container in item["spec"]["template"]["spec"]["containers"]:
            yield item["metadata"]["name"], item["spec"]["template"], container


def _container(installation: str, name: str) -> dict[str, Any]:
    (found,) = (container for _, _, container in _workloads(installation) if container["name"] == name)
    return found


def _environment(container: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables of a pod "west-manager-0" on the node "node-1" at 10.0.1.1."""
    fields = {"spec.nodeName": "node-1", "status.hostIP": "10.0.1.1", "metadata.name": "west-manager-0"}
    found: dict[str, str] = {}
    for variable in container.get("env", []):
        value = variable.get("value") or fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
        found[variable["name"]] = re.sub(r"\$\((\w+)\)", lambda match: found[match[1]], value)
    return found


def _settings(installation: str, component: str, directory: Path) -> Any:
    """Load a component's settings from its file and variables, as the container does."""
    (files,) = (item["data"] for item in _of_kind(installation, "ConfigMap"))
    file = directory / f"{component}.yaml"
    file.write_text(files[file.name])
    environment = _environment(_container(installation, component))
    return config.load(COMPONENTS[component], component=component, file=file, environment=environment)


def _matches(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    return selector.items() <= labels.items()


def test_helm_s_lint_finds_nothing() -> None:
    done = subprocess.run([find_helm(), "lint", "--strict", CHART], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("installation", INSTALLATIONS)
def test_objects_follow_the_api_s_schemas(installation: str, version: str) -> None:
    for item in _objects(installation):
        if item["kind"] not in CUSTOM_KINDS:
            kubernetes_validate.validate(item, version, strict=True)


def test_an_unknown_field_does_not_follow_the_schema() -> None:
    wrong = json.loads(json.dumps(_of_kind("plain", "DaemonSet")[0]))
    wrong["spec"]["replicas"] = 2
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("installation", INSTALLATIONS)
def test_names_of_objects_begin_with_the_release_and_differ(installation: str) -> None:
    release = INSTALLATIONS[installation][2]
    names = [(item["kind"], item["metadata"]["name"]) for item in _objects(installation)]
    assert len(set(names)) == len(names)
    assert all(name.startswith(f"{release}-") for _, name in names)


def test_containers_but_the_engine_have_no_privilege() -> None:
    for name, template, container in _workloads("plain"):
        pod, security = template["spec"]["securityContext"], container["securityContext"]
        assert pod["runAsUser"] != 0 and pod["seccompProfile"]["type"] == "RuntimeDefault", name
        assert not security["allowPrivilegeEscalation"] and security["capabilities"]["drop"] == ["ALL"], name
        if container["name"] != "vllm":
            assert security["readOnlyRootFilesystem"] and "add" not in security["capabilities"], name
        assert template["spec"]["automountServiceAccountToken"] is False
        assert template["spec"]["enableServiceLinks"] is False
        assert "limits" in container["resources"] and "readinessProbe" in container


@pytest.mark.parametrize("installation", INSTALLATIONS)
def test_components_load_their_settings(installation: str, tmp_path: Path) -> None:
    started = {component_of(container.get("command", [])) for _, _, container in _workloads(installation)} - {None}
    assert started == ({"agent"} if installation == "second" else {"agent", "manager", "router"})
    for component in started:
        assert component is not None
        _settings(installation, component, tmp_path)


@pytest.mark.parametrize("installation", INSTALLATIONS)
def test_selectors_match_pods(installation: str) -> None:
    pods = [template["metadata"]["labels"] for _, template, _ in _workloads(installation)]
    for item in _of_kind(installation, "Service", "PodDisruptionBudget", "NetworkPolicy"):
        selector = item["spec"].get("podSelector", item["spec"].get("selector"))
        labels = {key: value for key, value in selector.get("matchLabels", selector).items() if "pod-name" not in key}
        assert any(_matches(labels, pod) for pod in pods), item["metadata"]["name"]


def test_policies_let_in_those_that_the_components_serve() -> None:
    pods = {template["metadata"]["labels"]["app.kubernetes.io/name"] for _, template, _ in _workloads("plain")}
    allowed = {}
    for policy in _of_kind("plain", "NetworkPolicy"):
        sources = [source for rule in policy["spec"]["ingress"] for source in rule.get("from", [])]
        selected = (source["podSelector"]["matchLabels"] for source in sources if "podSelector" in source)
        allowed[policy["metadata"]["name"]] = {labels["app.kubernetes.io/name"] for labels in selected}
        assert allowed[policy["metadata"]["name"]] <= pods
    assert allowed == {
        "west-redis": {"prfaas-manager"},
        "west-manager": {"prfaas-manager", "prfaas-router"},
        "west-router": set(),
    }


def test_monitors_find_the_pages_of_managers_and_routers() -> None:
    found = {}
    for monitor in _of_kind("plain", "ServiceMonitor"):
        (endpoint,) = monitor["spec"]["endpoints"]
        for service in _of_kind("plain", "Service"):
            if _matches(monitor["spec"]["selector"]["matchLabels"], service["metadata"]["labels"]):
                assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
                found[service["metadata"]["name"]] = endpoint.get("authorization", {}).get("credentials")
    assert found == {"west-managers": None, "west-router": {"name": "prfaas-api-keys", "key": "operator-key"}}


@pytest.mark.parametrize("installation", ["plain", "tls", "issued"])
def test_managers_advertise_the_addresses_that_agents_and_routers_dial(installation: str, tmp_path: Path) -> None:
    managers = _settings(installation, "manager", tmp_path).advertise
    for component in ("agent", "router"):
        dialled = _settings(installation, component, tmp_path).managers
        assert dialled == (managers, managers.replace("manager-0", "manager-1"))


def test_the_second_datacenter_uses_the_managers_of_the_first(tmp_path: Path) -> None:
    first, second = (_settings(name, "agent", tmp_path) for name in ("tls", "second"))
    assert second.managers == first.managers
    assert (second.cluster, second.cluster_kind, second.name) == ("east", "prfaas", "east-node-1")
    assert not _of_kind("second", "Deployment", "StatefulSet", "Service")


def test_a_service_outside_leads_to_each_manager() -> None:
    outside = [item["spec"] for item in _of_kind("tls", "Service") if item["spec"].get("type") == "LoadBalancer"]
    pods = [spec["selector"]["statefulset.kubernetes.io/pod-name"] for spec in outside]
    assert pods == ["west-manager-0", "west-manager-1"]


@pytest.mark.parametrize("installation", ["plain", "tls"])
def test_engine_and_agent_share_socket_user_and_network(installation: str, tmp_path: Path) -> None:
    found = {container["name"]: (template["spec"], container) for _, template, container in _workloads(installation)}
    pods = [found[name][0] for name in ("agent", "vllm")]
    assert all(pod["hostNetwork"] for pod in pods)
    assert pods[0]["securityContext"] == pods[1]["securityContext"]
    assert pods[0]["nodeSelector"] == pods[1]["nodeSelector"]
    sockets = [next(item for item in pod["volumes"] if item["name"] == "socket") for pod in pods]
    assert sockets[0] == sockets[1]
    engine = found["vllm"][1]
    (argument,) = (item for item in engine["args"] if item.startswith("--kv-transfer-config="))
    transfer = json.loads(argument.split("=", 1)[1])
    agent = _settings(installation, "agent", tmp_path)
    assert transfer["kv_connector_extra_config"]["agent_socket"] == str(agent.socket)
    assert transfer["kv_role"] == "kv_both"
    scheme = "https" if installation == "tls" else "http"
    assert [entry.url for entry in agent.engines] == [f"{scheme}://10.0.1.1:8000"]
    assert f"--served-model-name={agent.engines[0].model}" in engine["args"]
    assert ("--ssl-cert-reqs=2" in engine["args"]) == (installation == "tls")


def test_the_pool_fits_into_the_agent_s_memory(tmp_path: Path) -> None:
    limit = int(_container("plain", "agent")["resources"]["limits"]["memory"].removesuffix("Gi")) << 30
    agent = _settings("plain", "agent", tmp_path)
    assert agent.pool_bytes < limit <= 1.05 * agent.pool_bytes


@pytest.mark.parametrize("component", ["agent", "manager", "router"])
def test_components_show_certificates_that_their_pods_mount(component: str, tmp_path: Path) -> None:
    settings = _settings("tls", component, tmp_path)
    files = {settings.tls.authority, settings.tls.certificate, settings.tls.key}
    assert files == {TLS / "ca.crt", TLS / "tls.crt", TLS / "tls.key"}
    assert str(TLS) in [mount["mountPath"] for mount in _container("tls", component)["volumeMounts"]]
    assert not settings.insecure_plaintext
    if component != "manager":
        assert settings.engine_tls == "deployment"


def test_probes_of_managers_show_a_certificate() -> None:
    container = _container("tls", "manager")
    console = config.load(ConsoleConfig, component="console", environment=_environment(container))
    assert console.pages == ("https://127.0.0.1:7411",)
    assert console.tls.certificate == TLS / "tls.crt"
    commands = [container[probe]["exec"]["command"] for probe in ("readinessProbe", "livenessProbe")]
    assert commands == [["prfaas", "status", "--ready"], ["prfaas", "status"]]


def test_managers_reach_redis_over_mutual_tls_alone(tmp_path: Path) -> None:
    manager = _settings("tls", "manager", tmp_path)
    url = urlsplit(manager.redis_url)
    (service,) = (item for item in _of_kind("tls", "Service") if item["metadata"]["name"] == "west-redis")
    assert (url.scheme, url.hostname, url.port) == ("rediss", "west-redis", service["spec"]["ports"][0]["port"])
    assert dict(parse_qsl(url.query)) == {
        "ssl_ca_certs": str(manager.tls.authority),
        "ssl_certfile": str(manager.tls.certificate),
        "ssl_keyfile": str(manager.tls.key),
    }
    arguments = _container("tls", "redis")["args"]
    options = dict(zip(arguments[1::2], arguments[2::2], strict=True))
    assert (options["--port"], options["--tls-port"], options["--tls-auth-clients"]) == ("0", "6379", "yes")


def test_issued_certificates_carry_the_names_that_are_dialled(tmp_path: Path) -> None:
    issued = {item["metadata"]["name"]: item["spec"] for item in _of_kind("issued", "Certificate")}
    used = {
        volume["secret"]["secretName"]
        for _, template, _ in _workloads("issued")
        for volume in template["spec"].get("volumes", [])
        if volume["name"] == "tls"
    }
    assert {spec["secretName"] for spec in issued.values()} == used
    assert issued["west-agent-tls"]["dnsNames"] == ["west-node-1", "west-node-2"]
    assert _settings("issued", "agent", tmp_path).name in issued["west-agent-tls"]["dnsNames"]
    hosts = [address.rsplit(":", 1)[0] for address in _settings("issued", "router", tmp_path).managers]
    assert issued["west-manager-tls"]["dnsNames"] == hosts
    assert issued["west-manager-tls"]["ipAddresses"] == ["127.0.0.1"]


def _leaves(values: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value and key not in ("resources", "settings"):
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


GROUP_LEAVES = list(_leaves(VALUES["nodeGroups"][0]))
ROOT_LEAVES = [(path, value) for path, value in _leaves(VALUES) if path != ("nodeGroups",)]
# Other values for those that may not be any text, number or truth value.
OTHERS: dict[str, Any] = {
    "image.pullPolicy": "Always",
    "imagePullSecrets": [{"name": "registry"}],
    "cluster.kind": "prfaas",
    "seLinuxOptions": {"type": "spc_t"},
    "agent.settings": {"silence_seconds": "3s"},
    "agent.tolerations": [],
    "managers.settings": {"silence_seconds": "3s"},
    "managers.addresses": ["manager.example:7410"],
    "managers.outside.annotations": {"key": "value"},
    "managers.resources": {"limits": {"memory": "1Gi"}},
    "router.service.type": "NodePort",
    "router.service.annotations": {"key": "value"},
    "router.settings": {"silence_seconds": "3s"},
    "router.resources": {"limits": {"memory": "1Gi"}},
    "redis.url": "redis://elsewhere:6379/0",
    "redis.resources": {"limits": {"memory": "1Gi"}},
    "tls.issuer": {"name": "other"},
    "networkPolicies.nodeCidrs": ["192.168.0.0/16"],
    "nodes": ["node-9"],
    "engine.role": "prefill",
    "engine.args": ["--max-model-len=4096"],
    "engine.env": [{"name": "HF_TOKEN", "value": "token"}],
}
# Values that count only together with others.
CONTEXTS: dict[str, dict[str, Any]] = {
    "managers.addresses": {"managers": {"enabled": False, "addresses": ["a:1"]}, "redis": {"enabled": False}},
    "managers.enabled": {"managers": {"addresses": ["a:1"]}},
    "managers.outside.enabled": {"managers": {"outside": {"domain": "west.example"}}},
    "managers.outside.domain": {"managers": {"outside": {"enabled": True, "domain": "west.example"}}},
    "managers.outside.annotations": {"managers": {"outside": {"enabled": True, "domain": "west.example"}}},
    "redis.enabled": {"redis": {"url": "redis://elsewhere:6379/0"}},
    "tls.issuer": {"tls": {"enabled": True}, **NODES},
    "nodes": {"tls": {"enabled": True, "issuer": {"name": "prfaas"}}, **NODES},
}


def _unlike(name: str, value: Any) -> Any:
    if name in OTHERS:
        return OTHERS[name]
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else f"{value or 'other'}1"


def _changed(values: Mapping[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """Return a copy of nested mappings with one more value."""
    inner = _changed(values.get(path[0], {}), path[1:], value) if path[1:] else value
    return {**values, path[0]: inner}


@pytest.mark.parametrize(
    ("path", "value"), ROOT_LEAVES, ids=lambda item: ".".join(item) if isinstance(item, tuple) else ""
)
def test_every_value_changes_the_objects(path: tuple[str, ...], value: Any) -> None:
    name = ".".join(path)
    context = CONTEXTS.get(name, {"monitoring": {"enabled": True}} if "monitoring" not in name else {})
    assert _render((), context) != _render((), _changed(context, path, _unlike(name, value)))


@pytest.mark.parametrize(
    ("path", "value"), GROUP_LEAVES, ids=lambda item: ".".join(item) if isinstance(item, tuple) else ""
)
def test_every_value_of_a_group_changes_the_objects(path: tuple[str, ...], value: Any) -> None:
    name = ".".join(path)
    context = CONTEXTS.get(name, {"nodeGroups": VALUES["nodeGroups"]})
    (group,) = context["nodeGroups"]
    changed = {**context, "nodeGroups": [_changed(group, path, _unlike(name, value))]}
    assert _render((), context) != _render((), changed)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"cluster": {"kind": "decode"}}, "/cluster/kind"),
        ({"managers": {"enabled": False}}, "managers.addresses"),
        ({"managers": {"outside": {"enabled": True}}}, "managers.outside.domain"),
        ({"redis": {"enabled": False}}, "redis.url"),
        ({"tls": {"enabled": True, "issuer": {"name": "prfaas"}}}, "nodeGroups.nodes"),
        ({"agents": {}}, "agents"),
        ({"nodeGroups": [{"name": "h200", "poolGiB": 0, "engine": {"enabled": False}}]}, "poolGiB"),
    ],
)
def test_refused_values_are_named(values: Mapping[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=re.escape(field)):
        _render((), values)


def test_files_for_llm_d_name_the_router_the_picker_and_the_sidecar() -> None:
    settings = {"ext_proc_listen": "0.0.0.0:9002", "insecure_plaintext": True}
    assert "0.0.0.0:9002" in _render((), {"router": {"settings": settings}})
    service, policy, pool, route = yaml.safe_load_all((CHART.parent / "llm-d/picker.yaml").read_text())
    for item in (service, policy):
        kubernetes_validate.validate(item, VERSIONS[-1], strict=True)
    (router,) = (template for name, template, _ in _workloads("plain") if name == "west-router")
    for selector in (service["spec"]["selector"], policy["spec"]["podSelector"]["matchLabels"]):
        assert _matches(selector, router["metadata"]["labels"])
    picker, (opened,) = pool["spec"]["endpointPickerRef"], policy["spec"]["ingress"][0]["ports"]
    assert picker["name"] == service["metadata"]["name"]
    assert service["spec"]["ports"][0]["port"] == picker["port"]["number"] == opened["port"] == 9002
    assert route["spec"]["rules"][0]["backendRefs"][0]["name"] == pool["metadata"]["name"]
    (sidecar,) = yaml.safe_load((CHART.parent / "llm-d/sidecar.yaml").read_text())["spec"]["template"]["spec"][
        "containers"
    ]
    assert [{"number": port["containerPort"]} for port in sidecar["ports"]] == pool["spec"]["targetPorts"]
    command = [str(Path(sys.executable).parent / sidecar["command"][0]), *sidecar["args"], "--check-config"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and f":{sidecar['ports'][0]['containerPort']}" in sidecar["args"][1], done.stderr
