"""Settings and texts of the server."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from prfaas import config
from prfaas.cli.colocate import main
from prfaas.colocate.config import DTYPE_NAMES, MAX_TOKENS, ColocateConfig
from prfaas.colocate.device.memory import DTYPES
from prfaas.colocate.processes.ring import RING_WORDS
from prfaas.colocate.server import Text, executor_settings, parse_completion
from prfaas.errors import ConfigError


def test_a_character_cut_between_tokens_comes_with_its_last_byte() -> None:
    text = Text()
    assert [text.add([token]) for token in "é€".encode()] == ["", "é", "", "", "€"]
    assert text.add([0xE2, 300]) == "�<300>"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"listen": "here"}, "listen: 'here': not host:port"),
        ({"shape": "huge"}, "shape: 'huge': not one of the accepted words"),
        ({"seed": "-1"}, "seed: '-1': not a number"),
        ({"seed": str(1 << 63)}, "seed: .* too large"),
        ({"served_model_name": " "}, "served_model_name: ' ': empty"),
        ({"dtype": "int4"}, "dtype: 'int4'"),
        ({"num_blocks": "1"}, "num_blocks: '1': too small"),
        ({"block_tokens": "0"}, "block_tokens: '0': too small"),
        ({"max_rows": "0"}, "max_rows: '0': too small"),
        ({"max_requests": "0"}, "max_requests: '0': too small"),
        ({"max_tokens": "1"}, "max_tokens: '1': too small"),
        ({"max_tokens": "1M"}, "max_tokens: '1M': too large"),
        ({"max_tokens": "9000"}, "max_tokens: 9000 are more than num_blocks and block_tokens hold, 8176"),
        ({"num_threads": "5000"}, "num_threads: '5000': too large"),
        ({"partition": "half"}, "partition: 'half'"),
        ({"profile": "p.yaml"}, "profile: needs partition: affinity"),
        ({"itl_slo_seconds": "40ms"}, "itl_slo_seconds: needs profile"),
        ({"profile": "p.yaml", "partition": "affinity", "itl_slo_seconds": "0"}, "itl_slo_seconds: '0': too small"),
        ({"dwell_steps": "8"}, "dwell_steps: needs profile"),
        ({"profile": "p.yaml", "partition": "affinity", "dwell_steps": "0"}, "dwell_steps: '0': too small"),
        ({"silence_seconds": "400ms"}, "silence_seconds: needs agent_socket"),
        ({"tenant": "us"}, "tenant: needs agent_socket"),
        ({"reuse_min_tokens": "128"}, "reuse_min_tokens: needs agent_socket"),
    ],
)
def test_a_setting_that_makes_no_sense_is_named(flags: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config.load(ColocateConfig, component="colocate", environment={}, flags=flags)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"profile": Path("/nonexistent.yaml"), "partition": "affinity"}, "nonexistent.yaml: cannot be read"),
        ({"partition": "affinity"}, "partition: shares of affinity follow a profile"),
        ({"num_blocks": 1 << 40}, "num_blocks, max_requests: .* this machine has"),
        ({"max_requests": 1 << 40}, "num_blocks, max_requests: .* this machine has"),
    ],
)
def test_what_this_machine_does_not_have_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        executor_settings(dataclasses.replace(ColocateConfig(), **changes))


def test_blocks_that_no_agent_could_hash_are_refused_by_the_settings_themselves() -> None:
    with pytest.raises(ValueError, match="block_tokens: 24; with an agent a multiple of 16"):
        ColocateConfig(agent_socket=Path("/s"), block_tokens=24)


def test_the_words_of_the_settings_are_those_that_the_code_knows() -> None:
    assert set(DTYPE_NAMES) == set(DTYPES)
    assert 2 * MAX_TOKENS < RING_WORDS


@pytest.mark.parametrize("stop", ["x", -1, 0xFFFFFFFF, 1 << 32, 1.5])
def test_a_stop_token_that_no_ring_could_carry_is_refused(stop: object) -> None:
    assert parse_completion({"prompt": "a", "stop_token_ids": [0xFFFFFFFE]}).stop_token == 0xFFFFFFFE
    with pytest.raises(ValueError, match="stop_token_ids"):
        parse_completion({"prompt": "a", "stop_token_ids": [stop]})


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [True]},
        {"prompt": "a", "max_tokens": True},
        {"prompt": "a", "stop_token_ids": [True]},
        {"prompt": "a", "stop": "x"},
        {"prompt": "a", "logprobs": 1},
        {"prompt": "a", "echo": True},
        {"prompt": "a", "stream": "yes"},
        {"prompt": "a", "stream": 1},
        {"prompt": "a", "model": 7},
    ],
)
def test_what_would_be_answered_otherwise_than_asked_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"prompt|max_tokens|stop|logprobs|echo|stream: true or false; model"):
        parse_completion(body)
    assert parse_completion({"prompt": "a", "stop": None, "logprobs": None, "echo": False, "stream": None}).prompt == (
        97,
    )


def test_a_profile_that_cannot_be_written_is_said_before_it_is_measured(capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--shape", "tiny", "--partition", "affinity", "--profile", "/nowhere/p.yaml"]
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["profile", *arguments])
    assert "profile: /nowhere/p.yaml: No such file or directory; name a file" in capfd.readouterr().err


def test_the_help_has_a_line_for_each_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    begun = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert begun == ["serve", "profile"]
