"""The unchanged OpenAI client at a colocated instance of a real model."""

from collections.abc import Iterator

import openai
import pytest
from openai.types.chat import ChatCompletionUserMessageParam

from tests.integration.colocate.conftest import MakeInstance
from tests.integration.colocate.instance import Instance

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.soak]  # Downloads the model, 93 MB.
QUESTION = [
    ChatCompletionUserMessageParam(role="user", content="What is the capital of France? Answer in one sentence.")
]


@pytest.fixture(scope="module")
def instance(make_instance: MakeInstance) -> Instance:
    return make_instance("smollm2")


@pytest.fixture
def client(instance: Instance) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{instance.engine.url}/v1", api_key="none", timeout=120) as opened:
        yield opened


@pytest.mark.timeout(900)
def test_chat_makes_sense_streamed_and_whole(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="smollm2", messages=QUESTION, temperature=0, max_tokens=40)
    answer = whole.choices[0].message.content
    assert answer is not None and "Paris" in answer
    stream = client.chat.completions.create(
        model="smollm2", messages=QUESTION, temperature=0, max_tokens=40, stream=True
    )
    assert "".join(event.choices[0].delta.content or "" for event in stream) == answer


@pytest.mark.timeout(900)
def test_sampling_stop_words_log_probabilities_and_batches(client: openai.OpenAI) -> None:
    prompt = "The colours of the rainbow are red, orange, yellow,"
    sampled = client.completions.create(model="smollm2", prompt=prompt, temperature=1.5, n=4, max_tokens=16, seed=1)
    assert len({choice.text for choice in sampled.choices}) > 1
    stopped = client.completions.create(model="smollm2", prompt=prompt, temperature=0, stop=["blue"], max_tokens=40)
    assert stopped.choices[0].finish_reason == "stop" and "blue" not in stopped.choices[0].text
    scored = client.completions.create(model="smollm2", prompt=[prompt, "One, two,"], temperature=0, logprobs=2)
    assert [len((choice.logprobs.top_logprobs or [{}])[0]) for choice in scored.choices if choice.logprobs] == [2, 2]
