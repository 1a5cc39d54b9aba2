"""Checks of a deployment with an unchanged OpenAI client."""

import json
from typing import Any

import openai
import pytest

from tests.support.paced_engine import MODEL
from tests.support.router import LONG, SHORT

TOOL: Any = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}


async def assert_serves_an_openai_client(url: str) -> None:
    """Short and long prompts, streamed and whole, on every route that the library calls."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id async for model in await client.models.list()] == [MODEL, "adapter"]
        for text in (SHORT, LONG):
            completion = await client.completions.create(model=MODEL, prompt=text)
            assert completion.choices[0].text == "abc"
            assert completion.usage is not None and completion.usage.total_tokens == 6
            events = await client.completions.create(model=MODEL, prompt=text, stream=True)
            assert "".join([event.choices[0].text async for event in events]) == "abc"
            messages: Any = [{"role": "user", "content": text}]
            chat = await client.chat.completions.create(model=MODEL, messages=messages)
            assert chat.choices[0].message.content == "abc"
            chunks = await client.chat.completions.create(model=MODEL, messages=messages, stream=True)
            assert "".join([chunk.choices[0].delta.content or "" async for chunk in chunks]) == "abc"
            called = await client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL], logprobs=True)
            calls: Any = called.choices[0].message.tool_calls
            assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
                ("look_up", messages)
            ]
            assert called.choices[0].logprobs is not None
            assert [token.token for token in called.choices[0].logprobs.content or ()] == ["a", "b", "c"]
        shown: Any = [{"role": "user", "content": [{"type": "text", "text": LONG}, IMAGE]}]
        seen = await client.chat.completions.create(model=MODEL, messages=shown, tools=[TOOL])
        calls = seen.choices[0].message.tool_calls
        assert [json.loads(call.function.arguments) for call in calls] == [shown], "unread, as it was sent"
        unknown = {"model": MODEL, "query": "x", "documents": ["a", "b"]}
        assert await client.post("/rerank", cast_to=object, body=unknown) == {"asked": unknown}
        with pytest.raises(openai.NotFoundError):
            await client.moderations.create(model=MODEL, input="x")
        embedded = await client.embeddings.create(model=MODEL, input="x", encoding_format="float")
        assert embedded.data[0].embedding == [0.5]
        with pytest.raises(openai.BadRequestError, match="cache_salt"):
            await client.completions.create(model=MODEL, prompt=SHORT, extra_body={"cache_salt": "s"})
