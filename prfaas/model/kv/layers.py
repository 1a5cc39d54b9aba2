"""KV bytes of layers of each kind, by their dimensions."""

from __future__ import annotations

from prfaas.model.kv.geometry import GroupBytes

# An indexer layer keeps keys in 8 bits, and one fp32 scale for each 128 elements (DeepSeek-V3.2).
_INDEXER_BLOCK = 128
_INDEXER_SCALE_BYTES = 4
# Engines keep the short convolution in bf16, whatever the type of the state.
_SHORT_CONVOLUTION_BYTES = 2


def full_attention(num_layers: int, *, kv_heads: int, key_dim: int, value_dim: int, element_bytes: int) -> GroupBytes:
    """Return multi-head, grouped-query or multi-query attention: a key and a value per KV head and token."""
    per_token = num_layers * kv_heads * (key_dim + value_dim) * element_bytes
    return GroupBytes("full_attention", num_layers, bytes_per_token=per_token)


def sliding_window(
    num_layers: int, *, kv_heads: int, key_dim: int, value_dim: int, element_bytes: int, window_tokens: int
) -> GroupBytes:
    """Return attention over the last `window_tokens` only."""
    per_token = num_layers * kv_heads * (key_dim + value_dim) * element_bytes
    return GroupBytes("sliding_window", num_layers, bytes_per_token=per_token, window_tokens=window_tokens)


def latent_attention(num_layers: int, *, latent_dim: int, rope_dim: int, element_bytes: int) -> GroupBytes:
    """Return multi-head latent attention: one latent and one rotary key per token, for all heads together."""
    return GroupBytes("mla", num_layers, bytes_per_token=num_layers * (latent_dim + rope_dim) * element_bytes)


def indexer(num_layers: int, *, key_dim: int) -> GroupBytes:
    """Return the keys with which sparse attention selects tokens."""
    scales = -(-key_dim // _INDEXER_BLOCK) * _INDEXER_SCALE_BYTES
    return GroupBytes("indexer", num_layers, bytes_per_token=num_layers * (key_dim + scales))


def linear_state(
    num_layers: int, *, elements: int, element_bytes: int, conv_channels: int, conv_kernel: int
) -> GroupBytes:
    """Return a recurrent state of `elements` numbers and the last conv_kernel − 1 inputs of its short convolution."""
    convolution = conv_channels * max(conv_kernel - 1, 0) * _SHORT_CONVOLUTION_BYTES
    return GroupBytes("linear_state", num_layers, state_bytes=num_layers * (elements * element_bytes + convolution))
