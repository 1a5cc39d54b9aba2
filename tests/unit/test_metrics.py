"""Metrics are named by the rules."""

import re

from tools.reference_tables import metric_catalogue


def test_every_name_has_prefix_component_and_base_unit() -> None:
    for item in metric_catalogue():
        assert re.fullmatch(r"prfaas_(agent|router|sidecar|manager|connector|colocate)(_[a-z0-9]+)+", item.name), (
            item.name
        )
        assert item.name.endswith("_total") == (item.kind == "counter"), item.name
        assert not re.search(r"_(ms|milliseconds|kb|mb|gb|bits)(_|$)", item.name), item.name
        assert "request_id" not in item.labels
