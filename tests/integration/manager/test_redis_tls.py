"""Mutual TLS between managers and Redis behind a port that requires certificates."""

import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest
import pytest_asyncio

from prfaas.console.authority import Authority, IssuedCertificate
from prfaas.errors import RecordUnreachable
from prfaas.index.store.redis_store import Keys, RedisStore
from prfaas.manager.record.embedded_redis import find_server
from prfaas.transport.net.tls import CertificateFiles, Certificates
from prfaas.transport.net.tls_proxy import TlsProxy
from tests.integration.security.listening import is_taken
from tests.support.deployment import Deployment, chain_of, hybrid_layout, stored, until_usable
from tests.support.waiting import wait_until
from tools.free_ports import free_address

LAYOUT = hybrid_layout()


def _start(directory: Path, *arguments: str) -> tuple[str, subprocess.Popen[bytes]]:
    """A redis-server at a free port; PyPI's is built without TLS."""
    address = free_address()
    options = (*arguments, "--port", address.rpartition(":")[2], "--bind", "127.0.0.1", "--save", "")
    process = subprocess.Popen([find_server(), *options], cwd=directory, stdout=subprocess.DEVNULL)
    wait_until(lambda: is_taken(address), what="Redis")
    return address, process


@pytest.fixture
def plain_redis(tmp_path: Path) -> Iterator[str]:
    address, process = _start(tmp_path)
    yield address
    process.kill()
    process.wait()


def _door(directory: Path, before: str) -> TlsProxy:
    issued = Authority(directory).issue("redis")
    certificates = Certificates(CertificateFiles(issued.authority, issued.certificate, issued.key))
    door = TlsProxy("127.0.0.1:0", certificates, setting="redis", refused=lambda reason: None)
    door.bind()
    door.start(before)
    return door


@pytest_asyncio.fixture
async def door(plain_redis: str, tmp_path: Path) -> AsyncIterator[TlsProxy]:
    door = _door(tmp_path, plain_redis)
    yield door
    await door.close()


@pytest_asyncio.fixture
async def sentinel_door(door: TlsProxy, tmp_path: Path) -> AsyncIterator[TlsProxy]:
    """A Sentinel behind a port with TLS that names the master's; it cannot watch it, and need not within an hour."""
    config = tmp_path / "sentinel.conf"
    config.write_text(
        f"sentinel monitor main {door.address.replace(':', ' ')} 1\nsentinel down-after-milliseconds main 3600000\n"
    )
    address, process = _start(tmp_path, str(config), "--sentinel")
    before = _door(tmp_path, address)
    yield before
    await before.close()
    process.kill()
    process.wait()


def _url(door: TlsProxy, certificates: IssuedCertificate, *, kind: str = "rediss", path: str = "0") -> str:
    """As docs/redis.md writes it."""
    files = {
        "ssl_ca_certs": certificates.authority,
        "ssl_certfile": certificates.certificate,
        "ssl_keyfile": certificates.key,
    }
    return f"{kind}://{door.address}/{path}?{urlencode(files, safe='/')}"


async def test_managers_share_a_record_over_mutual_tls(door: TlsProxy, deployment: Deployment, tmp_path: Path) -> None:
    """The managers are made after the door, and so end before it."""
    url = _url(door, Authority(tmp_path).issue("manager"))
    writer, follower = [await deployment.start_manager(name=name, redis_url=url) for name in ("one", "two")]
    await deployment.node("n1", writer, holds=stored(LAYOUT, chain_of(160), 160))
    await until_usable(deployment.client(follower), chain_of(161), {"n1": 160})


async def test_certificate_of_another_authority_is_refused(door: TlsProxy, tmp_path: Path) -> None:
    (tmp_path / "foreign").mkdir()
    foreign, trusted = Authority(tmp_path / "foreign").issue("manager"), Authority(tmp_path).issue("manager")
    deceived = IssuedCertificate(
        foreign.authority, trusted.certificate, trusted.key, trusted.revocations, trusted.serial, trusted.expires_at
    )
    for certificates in (foreign, deceived):
        store = RedisStore(_url(door, certificates), keys=Keys("prfaas"))
        with pytest.raises(RecordUnreachable):
            await store.check()
        await store.close()


async def test_sentinel_and_its_master_are_reached_over_mutual_tls(sentinel_door: TlsProxy, tmp_path: Path) -> None:
    store = RedisStore(_url(sentinel_door, Authority(tmp_path).issue("manager"), kind="rediss+sentinel", path="main"))
    await store.check()
    await store.close()
