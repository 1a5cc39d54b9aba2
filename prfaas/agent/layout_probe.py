"""Whether blocks of a peer's layout would be taken here: what it asks with an OPEN without objects."""

from __future__ import annotations

from prfaas.agent.layouts_here import TOO_MUCH, LayoutsHere
from prfaas.agent.plan import probed_layout, read_layout
from prfaas.transport.inbound import Accepted, OpenRequest, Rejected


def answer_layout_probe(request: OpenRequest, layouts: LayoutsHere) -> Accepted | Rejected:
    """Accepted: they would be, or nobody here has the model.

    Raises:
        LayoutError: the layout is malformed.
        RemoteProtocolError: it is no probe.
    """
    packed = probed_layout(request.open_body)
    known = layouts.known(packed)
    if known is None and not layouts.may_describe(request.peer_name, len(packed)):
        return Rejected("no_memory", TOO_MUCH)
    found = layouts.conflict(known or read_layout(packed))
    return Rejected("layout_mismatch", found) if found else Accepted(held=(), destination=_no_destination)


def _no_destination(index: int) -> memoryview:
    raise AssertionError(f"a probe has no object {index}")
