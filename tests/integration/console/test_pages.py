"""Pages that do not answer: what the command's user reads."""

import http.server
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from prfaas.console.authority import DAY, Authority
from prfaas.console.pages import read_json
from prfaas.errors import PageUnreachable
from tests.support.waiting import PATIENCE_SECONDS, POLL_SECONDS


@pytest.fixture
def encrypted(tmp_path: Path) -> Iterator[str]:
    """The address of a server that speaks TLS."""
    issued = Authority(tmp_path).issue("manager", valid_for=DAY, hosts=("127.0.0.1",))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(issued.certificate, issued.key)
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    serving = threading.Thread(target=server.serve_forever, args=(POLL_SECONDS,))
    serving.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    serving.join()
    server.server_close()


def test_a_page_asked_for_in_plain_text_of_a_server_that_hangs_up_may_want_tls(encrypted: str) -> None:
    with pytest.raises(PageUnreachable, match="may require TLS: write https://"):
        read_json(f"http://{encrypted}/state", timeout_seconds=PATIENCE_SECONDS)


def test_a_port_that_serves_no_pages_is_named_without_what_it_says() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            peer, _ = server.accept()
            with peer:
                peer.sendall(b"\x00\x00\x06\x04\x00\x1b[31m\r\n\r\n")

        answering = threading.Thread(target=answer)
        answering.start()
        with pytest.raises(PageUnreachable, match=r"pages are at http_listen or status_listen, not at listen$"):
            read_json(f"http://127.0.0.1:{server.getsockname()[1]}/state", timeout_seconds=PATIENCE_SECONDS)
        answering.join()
