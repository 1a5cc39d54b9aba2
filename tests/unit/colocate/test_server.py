"""Settings and texts of the server."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from prfaas.colocate.config import ColocateConfig
from prfaas.colocate.server import Text, executor_settings
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
        ({"partition": "green_contexts"}, "partition"),
        ({"partition": "affinity", "device": "cuda"}, "partition"),
        ({"profile": "/nonexistent.yaml"}, "nonexistent.yaml: cannot be read"),
    ],
)
def test_a_setting_that_does_not_fit_is_named(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        executor_settings(dataclasses.replace(ColocateConfig(), **changes))
