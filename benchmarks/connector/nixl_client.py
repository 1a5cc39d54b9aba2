"""A client at the near end of the link: the seconds to the first token of a prompt that is prefilled far, with NIXL.

Run inside the near namespace. The prefill request crosses the link on a connection that is open already, as a router's is.
Prints the seconds and the parameters of the decode leg. With parameters of an earlier prompt both legs leave at once.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tools.demo.client import complete, prompt_tokens

_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def main() -> None:
    far, near, family, num_tokens, vocabulary, seed, known = sys.argv[1:]
    prompt = prompt_tokens(int(num_tokens), seed=int(seed), vocabulary=range(int(vocabulary)))
    body = {"model": family, "prompt": prompt, "temperature": 0, "max_tokens": 1, "ignore_eos": True}
    connection = http.client.HTTPConnection(far.removeprefix("http://"), timeout=120)
    connection.connect()
    prefill = {**body, "kv_transfer_params": _PREFILL}
    # vLLM matches the legs of a push by this id.
    request_id = uuid.uuid4().hex
    if known:
        parameters = json.loads(known) | {"remote_request_id": f"cmpl-{request_id}-0", "remote_block_ids": []}
        with ThreadPoolExecutor() as pool:
            prefilled = pool.submit(_prefill, connection, prefill, request_id)
            seconds = _decode(near, {**body, "kv_transfer_params": parameters}, request_id)
            prefilled.result()  # A refused prefill must not count as a measurement.
    else:
        start = time.perf_counter()
        parameters = _prefill(connection, prefill, request_id)
        seconds = time.perf_counter() - start
        seconds += _decode(near, {**body, "kv_transfer_params": parameters}, request_id)
    print(seconds)
    print(json.dumps(parameters))


def _decode(url: str, body: dict[str, Any], request_id: str) -> float:
    return complete(url, body, headers={"X-Request-Id": request_id}).ttft_seconds


def _prefill(connection: http.client.HTTPConnection, body: dict[str, Any], request_id: str) -> dict[str, Any]:
    """Return the transfer parameters of the decode request."""
    headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    answer = json.load(connection.getresponse())
    found: dict[str, Any] = answer["kv_transfer_params"]
    return found


if __name__ == "__main__":
    main()
