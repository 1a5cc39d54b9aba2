from __future__ import annotations

from typing import Any

import pytest

from prfaas.console.waiting import awaited

ENGINES = [{"instance": f"west-0/{item}", "url": f"http://10.0.0.1:800{item}"} for item in range(2)]
IDLE = "nothing runs there; requests on the way must arrive first"


@pytest.mark.parametrize(
    ("loads", "message"),
    [
        (
            [],
            "west-0/0 does not report its load, at http://10.0.0.1:8000; west-0/1 does not report its load, at http://10.0.0.1:8001",
        ),
        (
            [{"instance": "west-0/0", "num_running": 2, "num_waiting": 1}, {"instance": "west-0/1"}],
            "west-0/0 has 3 requests",
        ),
        ([{"instance": "west-0/0"}, {"instance": "west-0/1"}], IDLE),
    ],
)
def test_what_keeps_a_node_from_being_idle_is_named_by_engine(loads: list[dict[str, Any]], message: str) -> None:
    node = {"node": {"name": "west-0", "cluster": "west", "engines": ENGINES}, "engines": loads}
    assert awaited({"nodes": [node]}, "west-0") == message


def test_a_node_of_which_the_manager_knows_nothing_is_said_to_be_so() -> None:
    assert awaited({}, "west-0") == "the manager does not know the node"
