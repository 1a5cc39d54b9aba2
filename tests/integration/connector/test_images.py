"""Prompts with equal tokens and unlike images never share KV: vLLM's own requests, and a real agent's look-ups."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from prfaas.connector.vllm.request import engine_request, token_chain
from prfaas.hashing import HashChain
from tests.support.agents import MODEL, NUM_TOKENS, Agents, on_thread

IMAGE_TOKENS = 20


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    running = Agents(tmp_path, launch=on_thread)
    yield running
    running.stop()


def _request(*images: tuple[str, int], num_tokens: int = NUM_TOKENS) -> Request:
    """Return a request whose images, by content hash and first token, have the same placeholders as any others."""
    features = [
        MultiModalFeatureSpec(
            data=None, modality="image", identifier=content, mm_position=PlaceholderRange(offset, IMAGE_TOKENS)
        )
        for content, offset in images
    ]
    limits = SamplingParams(max_tokens=1)
    return Request("r", list(range(num_tokens)), limits, None, mm_features=features or None)


def _chain(*images: tuple[str, int], num_tokens: int = NUM_TOKENS) -> HashChain:
    chain = token_chain(_request(*images, num_tokens=num_tokens), num_tokens, model=MODEL, tenant="")
    assert chain is not None
    return chain


def test_hashes_differ_from_the_image_on_and_are_equal_before_it() -> None:
    red, blue, text = _chain(("red", 40)), _chain(("blue", 40)), _chain()
    for end in range(1, 33):  # The image begins in the next unit of the hash chain.
        assert red.at(end) == blue.at(end) == text.at(end)
    for end in range(41, NUM_TOKENS + 1):
        assert len({red.at(end), blue.at(end), text.at(end)}) == 3
    assert red.at(NUM_TOKENS) == _chain(("red", 40)).at(NUM_TOKENS)


@pytest.mark.parametrize(
    "others", [[("red", 8), ("green", 50)], [("blue", 8), ("red", 50)], [("red", 9), ("blue", 50)]]
)
def test_hashes_cover_every_image_and_its_place(others: list[tuple[str, int]]) -> None:
    assert _chain(("red", 8), ("blue", 50)).at(NUM_TOKENS) != _chain(*others).at(NUM_TOKENS)


def test_the_connector_hashes_the_images_of_a_request() -> None:
    requests = [
        engine_request(_request((content, 40)), NUM_TOKENS, model=MODEL, has_priorities=False)
        for content in ("red", "blue")
    ]
    hashes = {chain.at(NUM_TOKENS) for request in requests if (chain := request.chain("")) is not None}
    assert len(hashes) == 2


def test_an_agent_serves_a_prompt_only_with_its_own_image(agents: Agents) -> None:
    engine = agents.engine(agents.start("west"), "w")
    engine.store(_chain(("red", 40)))
    longer = NUM_TOKENS + 16
    assert engine.lengths(_chain(("red", 40), num_tokens=longer))[0][0] == NUM_TOKENS
    for images in ([("blue", 40)], [("red", 41)], []):
        assert engine.lengths(_chain(*images, num_tokens=longer)) == []
