"""Keys of the connector: accepted forms and errors."""

from pathlib import Path

import pytest

from prfaas import local
from prfaas.connector.settings import read
from prfaas.errors import ConfigError


def test_without_a_socket_engines_look_where_this_user_s_agent_listens() -> None:
    assert read({"agent_socket": "/run/a.sock"}).agent_socket == Path("/run/a.sock")
    assert read({}).agent_socket == local.agent_socket()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"agnet_socket": "a"}, ["agnet_socket", "unknown key", "agent_socket"]),
        ({"agent_socket": "a", "silence_seconds": "soon"}, ["silence_seconds", "'soon'", "write"]),
        ({"agent_socket": "a", "reuse": "perhaps"}, ["reuse", "perhaps"]),
        ({"agent_socket": "/" + "a" * 107}, ["agent_socket", "has 108 bytes", "at most 107"]),
        ({"agent_socket": "a", "layerwise": "soon"}, ["layerwise", "'soon'", "auto"]),
    ],
)
def test_a_mistake_names_the_key_and_what_is_accepted(given: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        read(given)
    assert [word for word in ["kv_connector_extra_config", *words] if word not in str(error.value)] == []
