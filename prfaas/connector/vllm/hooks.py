"""Hooks at the end of recurrent layers: vLLM reports only the end of attention layers."""

from collections.abc import Callable
from typing import Any

# Methods that the operator of a recurrent layer calls, by vLLM's name of the kind. The state is written when they return.
# Compilers do not look into an operator, so the methods are plain Python in every forward pass. KDA, which counts as a
# gated delta net, has no operator. The operator of gated delta nets on a CPU calls no method.
_OPERATOR_METHODS = {
    "MAMBA2": ("conv_ssm_forward",),
    "GDN_ATTN": ("_forward_core",),
    "LINEAR": ("_forward",),
    "SHORT_CONV": ("forward_native", "forward_cuda"),
}


def on_layer_end(layer: Any, callback: Callable[[], None], *, is_compiled: bool) -> None:
    """Have `callback` called whenever `layer` has run.

    A module hook would break a compiled graph, so there the methods of the layer's operator are wrapped. A compiled layer
    without such a method reports nothing.
    """
    if not is_compiled:
        layer.register_forward_hook(lambda *arguments: callback())
        return
    for name in _OPERATOR_METHODS.get(layer.mamba_type.name, ()):
        if hasattr(layer, name):
            setattr(layer, name, _followed_by(getattr(layer, name), callback))


def _followed_by(method: Callable[..., Any], callback: Callable[[], None]) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        result = method(*arguments, **named)
        callback()
        return result

    return call
