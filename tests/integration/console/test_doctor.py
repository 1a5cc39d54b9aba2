"""`prfaas doctor` finds what is planted, and says the remedy; where all is well it says so."""

import asyncio
import datetime
import re
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from prfaas.cli.console import DIRECTORY
from prfaas.console.authority import DAY, Authority
from prfaas.transport.net.tls import CertificateFiles, Certificates
from tests.integration.console.patient import Patient
from tests.integration.console.terminal import Ran, run_here
from tests.support.agents import Agents
from tests.support.certificates import tls_record
from tests.support.deployment import Deployment
from tests.support.paced_engine import MODEL, PacedEngine, running
from tests.support.secret_files import write_secret
from tests.support.waiting import POLL_SECONDS, until
from tools.free_ports import free_address


@pytest.fixture
def patient(tmp_path: Path) -> Iterator[Patient]:
    made = Patient(tmp_path)
    yield made
    made.close()


def faults(ran: Ran) -> dict[str, str]:
    """By subject, of what is not good, what is message and the remedy."""
    assert ran.status in (0, 1), ran.error
    return {
        item["subject"]: f"{item['message']}; {item['remedy']}" for item in ran.document if item["outcome"] != "good"
    }


def test_where_all_is_well_everything_is_good(patient: Patient) -> None:
    patient.certify()
    ran = patient.examine()
    assert (faults(ran), ran.status) == ({}, 0)
    looked_at = {item["subject"] for item in ran.document}
    assert looked_at >= {"configuration", "secret", "port", "memory", "certificate_name", "congestion_control"}


def _secret_open_to_everybody(patient: Patient) -> None:
    patient.secret.chmod(0o644)


def _short_secret(patient: Patient) -> None:
    patient.secret.write_bytes(b"hush")


def _no_directory_for_the_socket(patient: Patient) -> None:
    patient.agent["socket"] = str(patient.directory / "nowhere/agent.sock")


def _advertises_all_addresses(patient: Patient) -> None:
    patient.agent |= {"listen": "0.0.0.0:0", "managers": ["127.0.0.1:9"], "cluster": "west"}
    patient.certify()


def _expired_certificate(patient: Patient) -> None:
    patient.certify(valid_for=-DAY)


def _certificate_about_to_expire(patient: Patient) -> None:
    patient.certify(valid_for=datetime.timedelta(hours=1))


def _key_of_another_certificate(patient: Patient) -> None:
    authority = Authority(patient.directory)
    changed = authority.issue("other")
    patient.certify(authority=authority)
    patient.agent["tls"]["key"] = str(changed.key)


def _another_authority(patient: Patient) -> None:
    patient.certify()
    patient.agent["tls"]["authority"] = str(Authority(patient.directory, "stranger").path)


def _certificate_of_another_name(patient: Patient) -> None:
    patient.certify("east-0")


def _revoked_certificate(patient: Patient) -> None:
    authority = Authority(patient.directory)
    issued = patient.certify(authority=authority)
    authority.revoke(issued.serial)
    patient.agent["tls"]["revocations"] = str(issued.revocations)


def _key_that_others_may_read(patient: Patient) -> None:
    patient.certify().key.chmod(0o644)


def _engine_that_is_not_there(patient: Patient) -> None:
    engine = {"instance": "west-0/0", "url": f"http://{free_address()}", "role": "both", "model": "tiny"}
    patient.agent["engines"] = [engine]


def _pages_in_plain_text_beside_certificates(patient: Patient) -> None:
    patient.certify()
    patient.agent |= {"status_listen": "0.0.0.0:0", "insecure_plaintext": True}


def _wire_in_plain_text_beside_certificates(patient: Patient) -> None:
    patient.certify()
    patient.agent |= {"listen": "0.0.0.0:0", "insecure_plaintext": True}


def _managers_pages_in_plain_text_beside_certificates(patient: Patient) -> None:
    issued = patient.certify()
    addresses = {"listen": "0.0.0.0:0", "http_listen": "0.0.0.0:0", "secret_file": str(patient.secret)}
    patient.manager = {**addresses, "tls": tls_record(issued), "insecure_plaintext": True}


def _router(patient: Patient, **settings: Any) -> None:
    engine = {"name": "w", "url": f"http://{free_address()}", "role": "both", "agent": "w", "wire": patient.wire}
    clusters = [{"name": "west", "kind": "pd", "instances": [engine]}]
    patient.router = {"listen": free_address(), "secret_file": str(patient.secret), "clusters": clusters, **settings}


def _router_that_asks_for_no_key(patient: Patient) -> None:
    _router(patient, listen="0.0.0.0:0", insecure_plaintext=True)


def _sidecar_in_plain_text(patient: Patient) -> None:
    patient.sidecar = {"listen": "0.0.0.0:0", "status_listen": free_address(), "insecure_plaintext": True}


def _file_of_keys_without_one(patient: Patient) -> None:
    write_secret(patient.directory / "keys", "")
    _router(patient, api_keys_file=str(patient.directory / "keys"))


def _manager(patient: Patient, **settings: str) -> None:
    addresses = {"listen": free_address(), "http_listen": free_address()}
    patient.manager = {**addresses, "secret_file": str(patient.secret), **settings}


def _redis_that_is_not_there(patient: Patient) -> None:
    _manager(patient, redis_url=f"redis://{free_address()}")


def _record_that_goes_with_its_manager(patient: Patient) -> None:
    _manager(patient)


def _ssd_beyond_the_disk(patient: Patient) -> None:
    patient.agent |= {"ssd_directory": str(patient.directory / "ssd"), "ssd_bytes": "900000TiB"}


def _wire_that_is_not_there(patient: Patient) -> None:
    patient.wire = free_address()
    _router(patient)


def _prefill_leg_in_plain_text_beside_certificates(patient: Patient) -> None:
    _router(patient, tls=tls_record(patient.certify("router")), insecure_plaintext=True)
    far = {"name": "e", "url": "http://192.0.2.1:8000", "role": "prefill", "agent": "e", "wire": patient.wire}
    patient.router["clusters"].append({"name": "east", "kind": "prfaas", "instances": [far]})
    patient.agent.pop("tls")


def _prefill_engine_in_plain_text_beside_certificates(patient: Patient) -> None:
    patient.certify()
    engine = {"instance": "w", "url": "http://192.0.2.1:8000", "role": "prefill", "model": "tiny"}
    patient.agent |= {"cluster": "east", "cluster_kind": "prfaas", "engines": [engine]}


def _keys_of_clients_that_are_operators(patient: Patient) -> None:
    keys = str(write_secret(patient.directory / "keys", "a-key a-client\n"))
    _router(patient, api_keys_file=keys, operator_keys_file=keys)


def _executor_without_an_agent(patient: Patient) -> None:
    patient.colocate = {"listen": free_address(), "agent_socket": str(patient.directory / "none.sock")}


PLANTED: list[tuple[Callable[[Patient], None], str, str]] = [
    (_secret_open_to_everybody, "secret", "chmod 600"),
    (_short_secret, "secret", "copy the deployment's secret"),
    (_no_directory_for_the_socket, "socket_directory", "install -d"),
    (_advertises_all_addresses, "advertised_address", "write advertise"),
    (_expired_certificate, "certificate_time", "renew it"),
    (_certificate_about_to_expire, "certificate_time", "before it expires"),
    (_key_of_another_certificate, "certificate_key", "openssl pkey"),
    (_another_authority, "certificate_authority", "tls.authority"),
    (_certificate_of_another_name, "certificate_name", "common name west-0"),
    (_revoked_certificate, "certificate_revoked", "another, with a new key"),
    (_key_that_others_may_read, "key_mode", "chmod 600"),
    (_engine_that_is_not_there, "engine", "curl http://127.0.0.1"),
    (_pages_in_plain_text_beside_certificates, "plaintext", "leave insecure_plaintext out"),
    (_wire_in_plain_text_beside_certificates, "plaintext", "leave insecure_plaintext out"),
    (_managers_pages_in_plain_text_beside_certificates, "plaintext", "leave insecure_plaintext out"),
    (_router_that_asks_for_no_key, "keys", "write api_keys_file"),
    (_sidecar_in_plain_text, "plaintext", "leave insecure_plaintext out"),
    (_file_of_keys_without_one, "configuration", "router.yaml line 1: api_keys_file: "),
    (_executor_without_an_agent, "agent_socket", "start prfaas-agent"),
    (_redis_that_is_not_there, "record", "redis-cli"),
    (_record_that_goes_with_its_manager, "record", "redis_directory: /var/lib/prfaas/redis"),
    (_ssd_beyond_the_disk, "disk", "ssd_bytes: "),
    (_wire_that_is_not_there, "wire", "nc -vz 127.0.0.1"),
    (_prefill_leg_in_plain_text_beside_certificates, "plaintext", "https:// in its url"),
    (_prefill_engine_in_plain_text_beside_certificates, "plaintext", "https:// in its url"),
    (_keys_of_clients_that_are_operators, "keys", "operator keys only"),
]


AGENT_SETTINGS = [
    ("pool_byte", "4GiB", "configuration", "prfaas config check"),
    ("listen", "192.0.2.1:7400", "address", "ip -brief address"),  # Documentation address (RFC 5737).
    ("pool_bytes", "64GiB", "memory", "pool_bytes: 3276MiB"),
    # Invalid without asking a name server.
    ("advertise", "no..name:7400", "advertised_address", "getent hosts no..name"),
]
KERNEL_SETTINGS = [
    ("net/ipv4/tcp_available_congestion_control", "reno cubic", "congestion_control", "modprobe tcp_bbr"),
    ("net/ipv4/tcp_allowed_congestion_control", "reno cubic", "congestion_control", '="reno cubic bbr"'),
    ("net/core/wmem_max", "212992", "send_buffer", "sysctl -w net.core.wmem_max=4194304"),
    ("net/ipv4/tcp_rmem", "4096 131072 6291456", "receive_buffer", 'tcp_rmem="4096 131072 33554432"'),
]


@pytest.mark.parametrize(("name", "value", "subject", "remedy"), AGENT_SETTINGS + KERNEL_SETTINGS)
def test_wrong_setting_is_found_with_its_remedy(
    patient: Patient, name: str, value: str, subject: str, remedy: str
) -> None:
    if "/" in name:
        patient.set_kernel(**{name: value})
    else:
        patient.agent[name] = value
    assert remedy in faults(patient.examine())[subject]


@pytest.mark.parametrize(("plant", "subject", "remedy"), PLANTED, ids=lambda item: getattr(item, "__name__", ""))
def test_what_is_planted_is_found_with_its_remedy(
    patient: Patient, plant: Callable[[Patient], None], subject: str, remedy: str
) -> None:
    plant(patient)
    ran = patient.examine("--timeout=2")
    assert remedy in faults(ran)[subject]
    assert ran.status == 1


def test_what_is_encrypted_is_called_so(patient: Patient) -> None:
    issued = patient.certify()
    _router(patient, ext_proc_listen="0.0.0.0:0", tls=tls_record(issued))
    patient.agent |= {"status_listen": "0.0.0.0:0", "listen": "0.0.0.0:0"}
    output = [item["message"] for item in patient.examine().document if item["subject"] in ("plaintext", "keys")]
    assert output == [
        "0.0.0.0:0: encrypted",
        "0.0.0.0:0: encrypted",
        f"{patient.router['listen']}: loopback only",
        output[0],
    ]


def test_the_certificate_that_clients_are_shown_is_looked_at(patient: Patient) -> None:
    authority = Authority(patient.directory)
    for valid_for, found in ((90 * DAY, {}), (-DAY, {"certificate_time": "it has expired"})):
        issued = authority.issue("shown", valid_for=valid_for)
        _router(patient, listen="0.0.0.0:0", client_tls=tls_record(issued))
        ran = patient.examine()
        assert [subject for subject, item in faults(ran).items() if found.get(subject, "") not in item] == []
        assert faults(ran).keys() == found.keys()
        keys = [item["message"] for item in ran.document if item["subject"] == "keys"]
        assert keys == ["0.0.0.0:0 requires certificates; it is encrypted"]


def _expired_list(authority: Authority) -> bytes:
    now = datetime.datetime.now(datetime.UTC)
    issuer = x509.load_pem_x509_certificate(authority.path.read_bytes()).subject
    made = x509.CertificateRevocationListBuilder(issuer, now - 2 * DAY, now - DAY)
    return made.sign(ec.generate_private_key(ec.SECP256R1()), hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


@pytest.mark.parametrize(
    ("spoil", "subject", "message", "starts"),
    [
        (lambda files: files.path.unlink(), "certificate_authority", "No such file", False),
        (lambda files: files.revocations.write_text("no list"), "certificate_files", "client_tls.revocations", False),
        (lambda files: files.revocations.write_bytes(_expired_list(files)), "certificate_time", "has expired", True),
    ],
    ids=["no authority", "no list", "an expired list"],
)
def test_what_tells_which_clients_to_let_in_is_looked_at(
    patient: Patient, spoil: Callable[[Authority], Any], subject: str, message: str, starts: bool
) -> None:
    authority = Authority(patient.directory)
    issued = authority.issue("shown", valid_for=90 * DAY)
    tls = {**tls_record(issued), "revocations": str(authority.revocations)}
    _router(patient, listen="0.0.0.0:0", client_tls=tls)
    assert faults(patient.examine()) == {}
    spoil(authority)
    found = faults(patient.examine())
    assert message in found[subject]
    assert ("configuration" in found) != starts


def test_a_port_that_something_else_holds_is_found(patient: Patient) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        patient.agent["listen"] = f"127.0.0.1:{port}"
        assert f"ss -ltnp 'sport = :{port}'" in faults(patient.examine())["port"]


class _ClockOfYesterday(BaseHTTPRequestHandler):
    def date_time_string(self, timestamp: float | None = None) -> str:
        return "Mon, 01 Jan 2024 00:00:00 GMT"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def page_of_yesterday() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _ClockOfYesterday) as server:
        thread = threading.Thread(target=server.serve_forever, args=(POLL_SECONDS,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_clock_that_differs_from_a_manager_s_is_found(patient: Patient, page_of_yesterday: str) -> None:
    assert re.search("chrony", faults(patient.examine(pages=page_of_yesterday))["clock"])


@pytest.mark.parametrize(("engine_tls", "subject"), [("deployment", "engine_model"), ("system", "engine")])
async def test_an_engine_that_asks_for_certificates_is_shown_the_agent_s_where_these_are_the_deployment_s(
    patient: Patient, engine_tls: str, subject: str
) -> None:
    issued = patient.certify()
    engine = PacedEngine(
        tls=Certificates(CertificateFiles(issued.authority, issued.certificate, issued.key)).server_context()
    )
    async with running(engine):
        announced = {"instance": "west-0/0", "url": engine.url, "role": "both", "model": MODEL}
        patient.agent |= {"engine_tls": engine_tls, "engines": [announced]}
        ran = await asyncio.to_thread(patient.examine)
    assert ran.status == (0 if subject == "engine_model" else 1)
    assert [item["subject"] for item in ran.document if item["subject"].startswith("engine")] == [subject]


@pytest.mark.skipif(DIRECTORY.exists(), reason=f"this machine has settings in {DIRECTORY}")
def test_a_machine_without_settings_and_managers_is_well_and_told_how_clocks_are_compared(patient: Patient) -> None:
    ran = run_here("doctor", f"--proc={patient.directory / 'proc'}")
    assert (faults(ran), ran.status) == ({}, 0)
    output = [item["message"] for item in ran.document if item["subject"] in ("manager", "clock")]
    assert len(output) == 1 and ("no manager is named" in output[0] or "within" in output[0])
    named = run_here("doctor", f"--proc={patient.directory / 'proc'}", f"--pages=http://{free_address()}")
    assert (list(faults(named)), named.status) == (["manager"], 1)


@pytest.mark.skipif(DIRECTORY.exists(), reason=f"this machine has settings in {DIRECTORY}")
def test_a_deployment_without_managers_is_well(patient: Patient) -> None:
    _router(patient)
    patient.examine()  # Writes the files.
    files = (f"--{name}={patient.directory / name}.yaml" for name in ("agent", "router"))
    ran = run_here("doctor", f"--proc={patient.directory / 'proc'}", *files)
    assert (faults(ran), ran.status) == ({}, 0)


async def test_a_manager_that_takes_the_secret_is_well(deployment: Deployment, patient: Patient) -> None:
    manager = await deployment.start_manager()
    patient.agent |= {"managers": [manager.address], "cluster": "west"}
    ran = await asyncio.to_thread(patient.examine, pages=f"http://{manager.http_address}")
    assert (faults(ran), ran.status) == ({}, 0)
    assert {"clock", "manager"} <= {item["subject"] for item in ran.document}


async def test_another_secret_than_the_manager_s_is_found(deployment: Deployment, patient: Patient) -> None:
    manager = await deployment.start_manager()
    patient.agent |= {"managers": [manager.address], "cluster": "west"}
    patient.secret.write_bytes(bytes(32))
    assert "secret_file" in faults(await asyncio.to_thread(patient.examine))["manager_secret"]


def test_a_manager_that_does_not_answer_is_found(patient: Patient) -> None:
    address = free_address()
    patient.agent |= {"managers": [address], "cluster": "west"}
    assert f"nc -vz {address.replace(':', ' ')}" in faults(patient.examine("--timeout=2"))["manager"]


@pytest.mark.parametrize(("cluster", "found"), [("east", {}), ("", {}), ("wset", {"cluster": "write cluster: east"})])
async def test_a_router_s_cluster_that_no_manager_knows_is_found(
    deployment: Deployment, patient: Patient, cluster: str, found: dict[str, str]
) -> None:
    manager = await deployment.start_manager()
    deployment.run(deployment.reporter("east-0", manager))
    await until(manager.world.live, what="the live node")
    _router(patient, managers=[manager.address], cluster=cluster, clusters=[])
    output = faults(await asyncio.to_thread(patient.examine, pages=f"http://{manager.http_address}"))
    assert output.keys() == found.keys() and all(found[subject] in output[subject] for subject in output)


async def test_an_address_that_is_advertised_and_at_which_nobody_answers_is_found(
    agents: Agents, patient: Patient
) -> None:
    agent = await asyncio.to_thread(agents.start, "west-0")
    patient.agent |= {"listen": agent.wire, "status_listen": agent.status}
    assert faults(await asyncio.to_thread(patient.examine)) == {}
    patient.agent["advertise"] = free_address()
    output = faults(await asyncio.to_thread(patient.examine))
    assert list(output) == ["advertised_address"] and "cannot reach" in output["advertised_address"]
