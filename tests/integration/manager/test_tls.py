"""Mutual TLS: a certificate of ours is needed, and it says for whom one speaks."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from prfaas.errors import IndexRefusal, ManagerUnreachable
from prfaas.rpc.channel import Channel, Tls
from prfaas.rpc.generated import manager_pb2 as pb
from tests.integration.manager.deployment import SECRET, Deployment

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates")


def openssl(directory: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)


def authority(directory: Path) -> None:
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    openssl(
        directory, "req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=authority", "-days", "2"
    )


def certificate(directory: Path, name: str) -> Tls:
    """A certificate for `name`, which may also serve on 127.0.0.1."""
    (directory / "ext").write_text("subjectAltName=IP:127.0.0.1")
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    openssl(directory, "req", *curve, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
    signed = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "ext", "-days", "2"]
    openssl(directory, "x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signed)
    return Tls(directory / "ca.pem", directory / f"{name}.pem", directory / f"{name}.key")


async def test_a_certificate_says_for_whom_one_speaks(deployment: Deployment, tmp_path: Path) -> None:
    authority(tmp_path)
    served, ours = certificate(tmp_path, "manager"), certificate(tmp_path, "n1")
    manager = await deployment.start_manager(
        tls_authority=served.authority, tls_certificate=served.certificate, tls_key=served.key
    )
    request = pb.MatchRequest(model="unheard-of")
    honest = Channel(manager.address, name="n1", secret=SECRET, tls=ours)
    with pytest.raises(IndexRefusal, match="unheard-of"):
        await honest.call("Match", request, timeout_seconds=5)
    liar = Channel(manager.address, name="n2", secret=SECRET, tls=ours)
    with pytest.raises(IndexRefusal) as refusal:
        await liar.call("Match", request, timeout_seconds=5)
    assert refusal.value.reason == "unauthenticated"
    plain = Channel(manager.address, name="n1", secret=SECRET)
    with pytest.raises(ManagerUnreachable):
        await plain.call("Match", request, timeout_seconds=5)
    for channel in (honest, liar, plain):
        await channel.close()
