"""Links over mutual TLS 1.3: accepted and refused peers, and changes of certificate files."""

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from prfaas.console.authority import DAY, Authority, IssuedCertificate
from prfaas.errors import ConfigError
from prfaas.transport.net.connection import Connection
from prfaas.transport.net.tls import MAX_SECONDS, CertificateFiles, Certificates
from prfaas.transport.protocol.messages import Have, TransferStats, encode_done, encode_have
from prfaas.transport.protocol.wire import FrameType, Header
from prfaas.transport.ranges import Ranges
from prfaas.transport.receiver.server import ReceiverConfig
from prfaas.transport.sender.api import SendCompleted, SendFailed
from prfaas.transport.sender.link import Link
from tests.support.raw_peers import RawReceiver, RawSender
from tests.support.transport_ends import GIVES_UP_SECONDS, Far, Near, make_far, make_near, objects_of, send
from tests.support.waiting import PATIENCE_SECONDS, wait_until
from tools.link import Filter, Relay

SIZES = (1 << 20, 3 << 20, 77, 1 << 16)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def _certificates(issued: IssuedCertificate, *, serves_seconds: float = MAX_SECONDS) -> Certificates:
    files = CertificateFiles(issued.authority, issued.certificate, issued.key, issued.revocations)
    return Certificates(files, serves_seconds=serves_seconds)


@contextlib.contextmanager
def _far(issued: IssuedCertificate, **config: object) -> Iterator[Far]:
    far = make_far(certificates=_certificates(issued), **config)
    try:
        yield far
    finally:
        far.receiver.close()


@contextlib.contextmanager
def _near(far: Far, issued: IssuedCertificate | None, *, silence_seconds: float = PATIENCE_SECONDS) -> Iterator[Near]:
    certificates = None if issued is None else _certificates(issued)
    near = make_near(far.address, certificates=certificates, num_connections=2, silence_seconds=silence_seconds)
    try:
        yield near
    finally:
        near.link.close()


def _refused(far: Far, issued: IssuedCertificate | None) -> contextlib.AbstractContextManager[Near]:
    """A sender that is refused and soon gives up."""
    return _near(far, issued, silence_seconds=GIVES_UP_SECONDS)


def _end(near: Near) -> SendCompleted | SendFailed:
    ended = near.end(send(near, objects_of(*SIZES)))
    assert isinstance(ended, SendCompleted | SendFailed)
    return ended


def test_nothing_of_a_transfer_is_readable_on_the_network(authority: Authority) -> None:
    secret = b"the words of a prompt" * 1000
    taken = bytearray()

    def eavesdrop(data: bytes) -> bytes:
        taken.extend(data)
        return data

    with _far(authority.issue("far")) as far, Relay(far.address) as relay:
        relay.filter(lambda: eavesdrop)
        near = make_near(relay.address, certificates=_certificates(authority.issue("near")), num_connections=1)
        assert isinstance(near.end(send(near, [secret])), SendCompleted)
        near.link.close()
    assert len(taken) > len(secret)
    assert b"words of a prompt" not in taken and b"near" not in taken


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("plain", "tls_none"), ("foreign", "tls_untrusted"), ("expired", "tls_expired"), ("revoked", "tls_revoked")],
)
def test_a_peer_without_a_valid_certificate_is_refused_and_counted(
    authority: Authority, tmp_path: Path, kind: str, reason: str
) -> None:
    if kind == "foreign":
        (tmp_path / "other").mkdir()
        certificate: IssuedCertificate | None = dataclasses.replace(
            Authority(tmp_path / "other").issue("near"), authority=authority.path, revocations=authority.revocations
        )
    else:
        certificate = authority.issue("near", valid_for=-DAY if kind == "expired" else DAY) if kind != "plain" else None
    if kind == "revoked":
        assert certificate is not None
        authority.revoke(certificate.serial)
    with _far(authority.issue("far")) as far, _refused(far, certificate) as near:
        ended = _end(near)
        assert isinstance(ended, SendFailed) and ended.reason == "unreachable"
        wait_until(lambda: far.receiver.refused.get(reason, 0) > 0)
        assert set(far.receiver.refused) == {reason}


def test_a_dialler_may_not_use_the_certificate_of_another_name(authority: Authority) -> None:
    with _far(authority.issue("far")) as far, _refused(far, authority.issue("somebody")) as near:
        assert isinstance(_end(near), SendFailed)
        wait_until(lambda: set(far.receiver.refused) == {"name"})


def test_a_listener_may_not_use_the_certificate_of_another_name(authority: Authority) -> None:
    with _far(authority.issue("somebody")) as far, _refused(far, authority.issue("near")) as near:

        def has_reason() -> bool:
            ended = _end(near)
            assert isinstance(ended, SendFailed)
            return "certificate for somebody" in ended.message

        wait_until(has_reason, what="the end of a first handshake")


def test_a_listener_without_tls_is_refused(authority: Authority) -> None:
    far = make_far()
    with _refused(far, authority.issue("near")) as near:
        assert isinstance(_end(near), SendFailed)
    far.receiver.close()


def test_a_certificate_revoked_meanwhile_is_refused_at_the_next_connection(authority: Authority) -> None:
    certificate = authority.issue("near")
    with _far(authority.issue("far")) as far:
        with _near(far, certificate) as near:
            assert isinstance(_end(near), SendCompleted)
        authority.revoke(certificate.serial)
        with _refused(far, certificate) as near:
            assert isinstance(_end(near), SendFailed)
            wait_until(lambda: bool(far.receiver.refused.get("tls_revoked")))


def test_a_receiver_ends_a_connection_that_its_sender_keeps_too_long(authority: Authority) -> None:
    """Otherwise a revoked certificate would stay valid for ever."""
    far = make_far(certificates=_certificates(authority.issue("far"), serves_seconds=1.0))
    with RawSender(far.address, name="near", certificates=_certificates(authority.issue("near"))) as raw:
        with pytest.raises(OSError):
            _ping_on(raw)
        wait_until(lambda: far.receiver.num_connections == 0)
    assert far.receiver.refused == {}
    far.receiver.close()


def _ping_on(raw: RawSender) -> None:
    while True:
        raw.connection.write(Header(FrameType.PING, 0).encode())
        assert raw.heard()[0].type is FrameType.PONG


def test_a_sender_replaces_a_connection_that_has_served_long(authority: Authority) -> None:
    dialled: list[int] = []

    def count() -> Filter:
        dialled.append(len(dialled))
        return bytes

    with _far(authority.issue("far")) as far, Relay(far.address) as relay:
        relay.filter(count)
        certificates = _certificates(authority.issue("near"), serves_seconds=2.0)
        near = make_near(relay.address, certificates=certificates, num_connections=1)

        def is_replaced() -> bool:
            assert isinstance(_end(near), SendCompleted)
            return len(dialled) > 1

        wait_until(is_replaced)
        assert far.receiver.refused == {}
        near.link.close()


def test_a_replaced_connection_waits_for_its_acknowledgements(authority: Authority) -> None:
    num_chunks, links = 0, list[Link]()

    def is_being_replaced() -> bool:
        with links[0]._changed:
            return any(line._is_retiring for line in links[0]._workers)

    def acknowledge_late(connection: Connection) -> None:
        nonlocal num_chunks
        while True:
            header = connection.read_header()
            connection.read_payload(header)
            if header.type is FrameType.OPEN:
                connection.write(encode_have(header.transfer_id, Have(Ranges(), ())))
            elif header.type is FrameType.CHUNK:
                num_chunks += 1
                wait_until(is_being_replaced)  # It is replaced once it is idle.
                connection.write(encode_done(header.transfer_id, TransferStats(10, 0)))
                connection.write(Header(FrameType.ACK, 0, offset=1).encode())

    with RawReceiver(acknowledge_late, certificates=_certificates(authority.issue("far"))) as receiver:
        certificates = _certificates(authority.issue("near"), serves_seconds=2.5)
        near = make_near(receiver.address, certificates=certificates, num_connections=1)
        links.append(near.link)
        assert isinstance(near.end(send(near, objects_of(10))), SendCompleted)
        assert num_chunks == 1
        near.link.close()


def test_a_new_certificate_is_taken_up_under_traffic(authority: Authority) -> None:
    issued = authority.issue("far")
    with _far(issued) as far, _near(far, authority.issue("near")) as near:
        objects = objects_of(*SIZES)
        transfer = send(near, objects, ready=False)
        wait_until(lambda: far.memory.get(transfer) is not None)
        authority.issue("far")  # Replaces the files of the first certificate.
        with _near(far, authority.issue("near")) as second:
            assert isinstance(_end(second), SendCompleted)
        for index, size in enumerate(SIZES):
            near.link.ready(transfer, first_object=index, num_objects=1, offset_bytes=0, length_bytes=size)
        assert isinstance(near.end(transfer), SendCompleted)


def test_unusable_files_are_logged_once_and_loaded_when_they_are_whole(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    issued = authority.issue("far")
    certificates, whole = (
        Certificates(CertificateFiles(issued.authority, issued.certificate, issued.key)),
        issued.key.read_text(),
    )
    before = certificates.client_context()
    for moment, content in enumerate(["half a key", "another half", whole], start=1):
        issued.key.write_text(content)
        os.utime(issued.key, ns=(moment, moment))  # Two writes within one tick of the kernel's clock look alike.
        contexts = {id(certificates.client_context()) for _ in range(3)}
        assert contexts == {id(before)} or content == whole
    assert before is not certificates.client_context()
    messages = [record.getMessage() for record in caplog.records if "tls.reload_failed" in record.getMessage()]
    assert len(messages) == 2 and all(str(issued.key) in message for message in messages)


def test_missing_files_are_named(tmp_path: Path) -> None:
    missing = tmp_path / "absent.pem"
    with pytest.raises(ConfigError, match=r"absent\.pem"):
        Certificates(CertificateFiles(missing, missing, missing))


def test_a_public_address_needs_certificates_or_consent(authority: Authority) -> None:
    with pytest.raises(ConfigError, match="Set tls"):
        make_far(listen="0.0.0.0:0")
    with _far(authority.issue("far"), listen="0.0.0.0:0") as far:
        assert far.receiver.num_connections == 0
    assert ReceiverConfig("0.0.0.0:0").certificates is None


def test_a_shared_context_takes_up_new_files(authority: Authority, tmp_path: Path) -> None:
    issued = authority.issue("keeper")
    certificates = Certificates(CertificateFiles(issued.authority, issued.certificate, issued.key))
    kept = certificates.shared_client_context()
    assert len(kept.get_ca_certs()) == 1
    (tmp_path / "new").mkdir()
    issued.authority.write_bytes(Authority(tmp_path / "new", "another").path.read_bytes())
    assert certificates.shared_client_context() is kept
    assert len(kept.get_ca_certs()) == 2


def _may_have_a_network() -> bool:
    if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "ip"))):
        return False
    return subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode == 0


@pytest.mark.root
@pytest.mark.skipif(not _may_have_a_network(), reason="needs root, to give a process a public address of its own")
@pytest.mark.parametrize("address", ["8.8.8.8", "100.64.0.1"])
@pytest.mark.parametrize(("consents", "refused", "num_told"), [("false", {"public": 2}, 1), ("true", {}, 0)])
def test_a_public_peer_of_a_private_address_needs_certificates_or_consent(
    address: str, consents: str, refused: dict[str, int], num_told: int
) -> None:
    peer = f"{sys.executable} -m tests.integration.transport.public_peer {address} {consents}"
    has_both = f"ip link set lo up && ip address add {address}/32 dev lo"
    run = subprocess.run(
        ["unshare", "-n", "sh", "-c", f"{has_both} && exec {peer}"], capture_output=True, timeout=2 * PATIENCE_SECONDS
    )
    assert json.loads(run.stdout) == refused, run.stderr.decode()
    assert run.stderr.decode().count("set insecure_plaintext: true") == num_told
