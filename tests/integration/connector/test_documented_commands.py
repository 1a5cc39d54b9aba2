"""vLLM's parser accepts every `vllm serve` command of the documentation."""

import importlib
import importlib.util

import pytest
from vllm.utils.argparse_utils import FlexibleArgumentParser

from prfaas.connector import settings
from tests.support.docs_blocks import commands_of, shell_blocks

pytestmark = pytest.mark.vllm
PARSERS = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.common.cli_args")  # Of vLLM 0.32 and 0.33.
make_arg_parser = next(
    importlib.import_module(module) for module in PARSERS if importlib.util.find_spec(module)
).make_arg_parser
COMMANDS = [words for block in shell_blocks() for words in commands_of(block.text) if words[0] == "vllm"]


def test_vllm_accepts_every_documented_command() -> None:
    parser = make_arg_parser(FlexibleArgumentParser())
    connectors = []
    for words in COMMANDS:
        arguments = parser.parse_args(words[2:])
        assert arguments.model_tag == words[2]
        if arguments.kv_transfer_config is not None:
            connectors.append(arguments.kv_transfer_config.kv_connector)
            if connectors[-1] == "PrfaasConnector":
                settings.read(arguments.kv_transfer_config.kv_connector_extra_config)
    assert sorted(connectors) == ["MultiConnector", "OffloadingConnector", *["PrfaasConnector"] * 3]
    assert len(COMMANDS) == 5
