"""Prompts with images on real engines: an image reuses its own KV, and no other image's."""

import base64
import http.client
import io
import json
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support.engine_pair import EnginePair, running_pair
from tests.support.waiting import wait_until
from tools.demo.client import prefilled_tokens
from tools.tiny_models import IMAGE_PIXELS

pytestmark = [pytest.mark.vllm, pytest.mark.soak, pytest.mark.timeout(900)]
QUESTION = "a question of more than two blocks " * 12


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnginePair]:
    pytest.importorskip("torchvision", reason="vLLM's multimodal models need it")
    with running_pair("llava", tmp_path_factory.mktemp("images")) as running:
        yield running


def _image(seed: int) -> dict[str, Any]:
    pixels = np.random.default_rng(seed).integers(0, 255, (IMAGE_PIXELS, IMAGE_PIXELS, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def _answer(pair: EnginePair, image: dict[str, Any], **fields: Any) -> list[int]:
    """Return greedy tokens of the decode engine for an image and a question."""
    content = [image, {"type": "text", "text": QUESTION}]
    body = {"model": pair.family, "messages": [{"role": "user", "content": content}], "max_tokens": 24}
    body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    client = http.client.HTTPConnection(pair.decode.url.removeprefix("http://"), timeout=120)
    try:
        client.request(
            "POST", "/v1/chat/completions", json.dumps({**body, **fields}), {"Content-Type": "application/json"}
        )
        answer = json.load(client.getresponse())
    finally:
        client.close()
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


def test_an_image_reuses_its_own_blocks_and_none_of_another_image(seeing: EnginePair) -> None:
    red, blue = _image(1), _image(2)
    expected = {
        name: _answer(seeing, image, cache_salt=os.urandom(8).hex()) for name, image in (("r", red), ("b", blue))
    }
    assert expected["r"] != expected["b"], "the image changes the answer"
    computed = []
    for name, image in (("r", red), ("r", red), ("b", blue), ("b", blue)):
        before = prefilled_tokens(seeing.decode.url)
        assert _answer(seeing, image) == expected[name]
        computed.append(prefilled_tokens(seeing.decode.url) - before)
        wait_until(seeing.has_healed, what="stored blocks")
    assert computed[0] == computed[2] > 2 * computed[1] == 2 * computed[3]
