"""vLLM's own parser takes every `vllm serve` of the documentation, and finds our connector's settings in it."""

from __future__ import annotations

import importlib
import importlib.util

import pytest
from vllm.utils.argparse_utils import FlexibleArgumentParser

from prfaas.connector import settings
from tests.support.docs_blocks import commands_of, shell_blocks

pytestmark = pytest.mark.vllm
PARSERS = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.common.cli_args")  # in vLLM 0.32, and from 0.33 on
make_arg_parser = next(importlib.import_module(its) for its in PARSERS if importlib.util.find_spec(its)).make_arg_parser
COMMANDS = [words for block in shell_blocks() for words in commands_of(block.text) if words[0] == "vllm"]


def test_vllm_takes_every_command_of_the_documentation() -> None:
    parser = make_arg_parser(FlexibleArgumentParser())
    connectors = []
    for words in COMMANDS:
        its = parser.parse_args(words[2:])
        assert its.model_tag == words[2]
        if its.kv_transfer_config is not None:
            connectors.append(its.kv_transfer_config.kv_connector)
            if connectors[-1] == "PrfaasConnector":
                settings.read(its.kv_transfer_config.kv_connector_extra_config)
    assert sorted(connectors) == ["MultiConnector", "PrfaasConnector", "PrfaasConnector"]
    assert len(COMMANDS) == 4


def test_vllm_refuses_a_flag_that_it_does_not_have() -> None:
    with pytest.raises(SystemExit):
        make_arg_parser(FlexibleArgumentParser()).parse_args(["M", "--kv-transfer-confg", "{}"])
