"""Settings and texts of the server."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from prfaas.colocate.config import ColocateConfig
from prfaas.colocate.server import Text, executor_settings, parse_completion
from prfaas.errors import ConfigError


def test_a_character_cut_between_tokens_comes_with_its_last_byte() -> None:
    text = Text()
    assert [text.add([token]) for token in "é€".encode()] == ["", "é", "", "", "€"]
    assert text.add([0xE2, 300]) == "�<300>"


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"shape": "huge"}, "shape"),
        ({"dtype": "int4"}, "dtype"),
        ({"device": "gpu"}, "device"),
        ({"partition": "green_contexts"}, "partition"),
        ({"partition": "affinity", "device": "cuda"}, "partition"),
        ({"profile": "/nonexistent.yaml"}, "nonexistent.yaml: cannot be read"),
    ],
)
def test_a_setting_that_does_not_fit_is_named(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        executor_settings(dataclasses.replace(ColocateConfig(), **changes))


@pytest.mark.parametrize("stop", ["x", -1, 0xFFFFFFFF, 1 << 32, 1.5])
def test_a_stop_token_that_no_ring_could_carry_is_refused(stop: object) -> None:
    assert parse_completion({"prompt": "a", "stop_token_ids": [0xFFFFFFFE]}).stop_token == 0xFFFFFFFE
    with pytest.raises(ValueError, match="stop_token_ids"):
        parse_completion({"prompt": "a", "stop_token_ids": [stop]})
