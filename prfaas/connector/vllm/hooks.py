"""The end of a recurrent layer's pass: vLLM reports that of attention layers alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# What a recurrent layer's operator calls of its layer, by vLLM's name of the kind: the state is written when it returns.
# An operator is opaque to whatever compiles the graph around it, so this is plain Python in every pass. KDA, which is of
# the kind of gated delta nets, has no operator, and theirs on a CPU calls nothing of its layer.
_OPERATOR_CALLS = {
    "MAMBA2": ("conv_ssm_forward",),
    "GDN_ATTN": ("_forward_core",),
    "LINEAR": ("_forward",),
    "SHORT_CONV": ("forward_native", "forward_cuda"),  # on a CPU, and elsewhere
}


def on_layer_end(layer: Any, ended: Callable[[], None], *, is_compiled: bool) -> Callable[[], None]:
    """Have `ended` called whenever `layer` has run; returns what undoes that.

    A hook would break a compiled graph. There the method that the layer's operator calls is wrapped; of a layer whose
    operator calls none, nothing is heard.
    """
    if not is_compiled:
        undo: Callable[[], None] = layer.register_forward_hook(lambda *arguments: ended()).remove
        return undo
    names = [its for its in _OPERATOR_CALLS.get(layer.mamba_type.name, ()) if hasattr(layer, its)]
    for name in names:
        setattr(layer, name, _then(getattr(layer, name), ended))

    def unwrap() -> None:
        for name in names:
            delattr(layer, name)

    return unwrap


def _then(method: Callable[..., Any], ended: Callable[[], None]) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        result = method(*arguments, **named)
        ended()
        return result

    return call
