"""What a user's unchanged OpenAI client sees of a deployment of paced engines, whatever stands before them."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.integration.router.door import LONG, SHORT
from tests.integration.router.paced_engine import MODEL


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
        embedded = await client.embeddings.create(model=MODEL, input="x", encoding_format="float")
        assert embedded.data[0].embedding == [0.5]
        with pytest.raises(openai.BadRequestError, match="cache_salt"):
            await client.completions.create(model=MODEL, prompt=SHORT, extra_body={"cache_salt": "s"})
