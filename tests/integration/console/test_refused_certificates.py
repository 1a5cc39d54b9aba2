"""Over mutual TLS a refusal says whose certificate it is about, what is wrong with it and how to look.

The certificates are those of `prfaas certs`.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from prfaas.index.membership import Node
from prfaas.manager.daemon import Manager
from prfaas.rpc.client import ManagerClient
from prfaas.rpc.reporter import Reporter
from prfaas.transport.net.tls import CertificateFiles, TlsConfig
from prfaas.types import AgentName, ClusterName
from tests.integration.console.terminal import Ran, run, run_here
from tests.support.deployment import SECRET, Deployment
from tests.support.waiting import until


class Site:
    """A directory of certificates, and which of them the operator's command names."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.files = self.certify("operator")
        self.certify("manager")

    def certify(self, name: str, *, days: int = 90, directory: Path | None = None) -> CertificateFiles:
        place = directory or self.directory
        ran = run_here("certs", "new", str(place), name, f"--days={days}")
        assert ran.status == 0, ran.error
        return CertificateFiles(place / "authority.pem", place / f"{name}.pem", place / f"{name}.key")

    async def manager(self, deployment: Deployment, **changes: object) -> Manager:
        given = self.directory
        tls = TlsConfig(
            authority=given / "authority.pem",
            certificate=given / "manager.pem",
            key=given / "manager.key",
            revocations=given / "authority.crl",
        )
        return await deployment.start_manager(tls=tls, **changes)


def _expired(site: Site) -> CertificateFiles:
    return site.certify("operator", days=-1)


def _revoked(site: Site) -> CertificateFiles:
    assert run_here("certs", "revoke", str(site.directory), "operator").status == 0
    return site.files


def _revoked_by_the_list(site: Site) -> CertificateFiles:
    item = _revoked(site)
    return CertificateFiles(item.authority, item.certificate, item.key, site.directory / "authority.crl")


def _of_another_authority(site: Site) -> CertificateFiles:
    item = site.certify("operator", directory=site.directory / "elsewhere")
    return CertificateFiles(site.files.authority, item.certificate, item.key)


def _of_another_name(site: Site) -> CertificateFiles:
    return site.certify("router")


def _before_a_manager_that_has_expired(site: Site) -> CertificateFiles:
    site.certify("manager", days=-1)
    return site.files


HUNG_UP = "the manager closed the connection, because it stops or refuses the certificate; {0}/operator.pem: "
REFUSED_HERE = "this side refuses the manager's certificate: "
REFUSED_HERE += "it must be valid, for 127.0.0.1 and signed by {0}/authority.pem; openssl s"
REFUSED: list[tuple[Callable[[Site], CertificateFiles], str]] = [
    (_expired, HUNG_UP + "it has expired; openssl x509 -noout -subject -issuer -enddate -in {0}/operator.pem"),
    (_revoked, HUNG_UP + "for operator, signed by {0}/authority.pem and good until "),
    (_revoked_by_the_list, HUNG_UP + "its authority has revoked it; openssl x509"),
    (_of_another_authority, HUNG_UP.replace("{0}/", "{0}/elsewhere/") + "{0}/authority.pem has not signed it ("),
    (
        _of_another_name,
        "in the name of operator, but its certificate is for router: use that name, or a certificate with",
    ),
    (_before_a_manager_that_has_expired, REFUSED_HERE),
]
# A failure at either end, where gRPC's library would write lines of its own to the process's standard error.
IN_A_PROCESS = (_expired, _before_a_manager_that_has_expired)


@pytest.mark.parametrize(("spoil", "message"), REFUSED, ids=[item.__name__ for item, _ in REFUSED])
async def test_an_operator_reads_whose_certificate_is_refused_and_why(
    deployment: Deployment, tmp_path: Path, spoil: Callable[[Site], CertificateFiles], message: str
) -> None:
    site = Site(tmp_path)
    files = await asyncio.to_thread(spoil, site)
    manager = await site.manager(deployment)
    command = run if spoil in IN_A_PROCESS else run_here
    ran = await asyncio.to_thread(command, "drain", "nobody", *_flags(manager, deployment), *_tls(files))
    assert ran.status == 2 and message.format(tmp_path) in ran.error, ran.error
    assert _num_lines(ran) == 1, ran.error


async def test_plain_text_and_certificates_do_not_go_together_and_it_is_said(
    deployment: Deployment, tmp_path: Path
) -> None:
    site = Site(tmp_path)
    encrypted, plain = await site.manager(deployment), await deployment.start_manager()
    ran = await asyncio.to_thread(run_here, "drain", "nobody", *_flags(encrypted, deployment))
    closed = "the manager closed the connection: if it requires certificates, set tls"
    assert closed in ran.error and _num_lines(ran) == 1
    ran = await asyncio.to_thread(run_here, "drain", "nobody", *_flags(plain, deployment), *_tls(site.files))
    assert "the manager answers in plain text" in ran.error
    assert _num_lines(ran) == 1, ran.error


async def test_of_pages_the_same_is_read(deployment: Deployment, tmp_path: Path) -> None:
    site = Site(tmp_path)
    manager = await site.manager(deployment, http_listen="0.0.0.0:0")
    files = await asyncio.to_thread(_expired, site)
    page = f"https://127.0.0.1:{manager.http_address.rpartition(':')[2]}"
    ran = await asyncio.to_thread(run_here, "status", f"--pages={page}", *_tls(files))
    assert ran.status == 2 and f"{tmp_path}/operator.pem: it has expired; openssl x509" in ran.error, ran.error


async def test_agents_and_routers_log_the_same(
    deployment: Deployment, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site = Site(tmp_path)
    manager = await site.manager(deployment)
    node, router = site.certify("n1", days=-1), site.certify("router", days=-1)
    item = Node(AgentName("n1"), ClusterName("east"), "pd", "n1:7400", 1, ())
    agent = deployment.run(Reporter([manager.address], node=item, secret=SECRET, tls=node))
    client = ManagerClient([manager.address], name="router", secret=SECRET, tls=router)
    watching = asyncio.create_task(anext(client.watch_state()))
    wanted = {f"{name}.pem: it has expired" for name in ("n1", "router")}
    await until(lambda: all(words in caplog.text for words in wanted), what="the word on both")
    assert "manager.lost" in caplog.text
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await client.close()
    await deployment.end(agent)


def _flags(manager: Manager, deployment: Deployment) -> list[str]:
    return [f"--managers={manager.address}", f"--secret-file={deployment.secret_file}", "--within=0s", "--timeout=30"]


def _tls(files: CertificateFiles) -> list[str]:
    flags = [f"--tls-authority={files.authority}", f"--tls-certificate={files.certificate}", f"--tls-key={files.key}"]
    return [*flags, *([f"--tls-revocations={files.revocations}"] if files.revocations else [])]


def _num_lines(ran: Ran) -> int:
    return ran.error.count("\n")
