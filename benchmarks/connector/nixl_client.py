"""A client at the near end of the link: the seconds to the first token of a prompt prefilled far and pulled by NixlConnector.

Run inside the near namespace. The prefill request crosses the link on a connection that is open already, as a router's is.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from typing import Any

from tools.demo.client import complete, prompt_tokens
from tools.tiny_models import VOCABULARY

_PULL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def main() -> None:
    far, near, family, num_tokens, seed = sys.argv[1:]
    prompt = prompt_tokens(int(num_tokens), seed=int(seed), vocabulary=VOCABULARY)
    body = {"model": family, "prompt": prompt, "temperature": 0, "max_tokens": 1, "ignore_eos": True}
    connection = http.client.HTTPConnection(far.removeprefix("http://"), timeout=120)
    connection.connect()
    start = time.perf_counter()
    found = _prefill(connection, {**body, "kv_transfer_params": _PULL})
    prefilled = time.perf_counter() - start
    print(prefilled + complete(near, {**body, "kv_transfer_params": found}).ttft_seconds)


def _prefill(connection: http.client.HTTPConnection, body: dict[str, Any]) -> dict[str, Any]:
    """Return the transfer parameters of the decode request."""
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = json.load(connection.getresponse())
    found: dict[str, Any] = answer["kv_transfer_params"]
    return found


if __name__ == "__main__":
    main()
