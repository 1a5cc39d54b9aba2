"""Registry of the KV kinds. A new kind is one module of this package and one entry of `KINDS`."""

from prfaas.kv.kinds.chunked_local import ChunkedLocal
from prfaas.kv.kinds.full_attention import FullAttention
from prfaas.kv.kinds.kind import KVKind
from prfaas.kv.kinds.linear_state import LinearState
from prfaas.kv.kinds.sliding_window import SlidingWindow

# The names travel between machines and are stored, so they never change.
KINDS: dict[str, KVKind] = {
    kind.name: kind for kind in (FullAttention(), SlidingWindow(), ChunkedLocal(), LinearState())
}
_BY_ANY_NAME = {name: kind for kind in KINDS.values() for name in (kind.name, *kind.variants)}


def kind_named(name: str) -> KVKind:
    """Return the kind of that name, or the kind that it is a variant of. Raises KeyError when there is none."""
    return _BY_ANY_NAME[name]
