"""Tiny models with seeded random weights and a byte-level tokenizer, one per family."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    CLIPVisionConfig,
    DeepseekV3Config,
    FalconH1Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    Lfm2Config,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    NemotronHConfig,
    Olmo3Config,
    Qwen3Config,
    Qwen3NextConfig,
)

SEED = 1234
NUM_TOKENS = 512  # 256 bytes, 3 special tokens, and tokens without a text of their own.
BEGIN, END, PADDING, IMAGE = 256, 257, 258, 259
IMAGE_PIXELS, PATCH_PIXELS = 56, 14
VOCABULARY = range(NUM_TOKENS // 2)  # Prompts use these token ids, one per byte.
MAX_POSITIONS = 1 << 16
WINDOW_TOKENS = 256
# Standard deviations of weights in units of 1/sqrt(fan-in). Sharp attention keeps greedy output from repeating one token.
QUERY_SPREAD = 5.0
HEAD_SPREAD = 3.0
QUERY_NORM = 8.0  # Replaces `QUERY_SPREAD` where queries are normalised.
_CHAT_TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}<assistant>"

_COMMON: dict[str, Any] = {
    "vocab_size": NUM_TOKENS,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": False,
    "bos_token_id": BEGIN,
    "eos_token_id": END,
    "pad_token_id": PADDING,
}
_GRANITE4H: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["mamba", "mamba", "mamba", "attention"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 128,
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 32,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "position_embedding_type": "rope",
}


@dataclass(frozen=True)
class Family:
    """Recipe for a tiny model of one architecture. `plain` fields are added to config.json."""

    config: Callable[..., Any]
    settings: dict[str, Any]
    dtype: str = "float32"  # Tokens do not depend on the batch in float32, but some kernels need bfloat16.
    plain: dict[str, Any] = field(default_factory=dict)
    weight_spread: float = 3.0
    embedding_spread: float = 1.0


def _llava_config(**text: Any) -> LlavaConfig:
    """Return a Llama that also takes images, 16 tokens each."""
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = CLIPVisionConfig(**size, image_size=IMAGE_PIXELS, patch_size=PATCH_PIXELS)
    return LlavaConfig(vision_config=vision, text_config=LlamaConfig(**text), image_token_index=IMAGE)


FAMILIES: dict[str, Family] = {
    "llama": Family(LlamaConfig, {"num_hidden_layers": 4, "head_dim": 32}),
    "llava": Family(_llava_config, {"num_hidden_layers": 4, "head_dim": 32}),
    "qwen3": Family(Qwen3Config, {"num_hidden_layers": 4, "head_dim": 32}),
    "gemma3": Family(
        Gemma3TextConfig,
        {"num_hidden_layers": 6, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": WINDOW_TOKENS},
        embedding_spread=0.3,  # The model multiplies embeddings by the square root of their width.
    ),
    # Layers of full attention keep half as many bytes per token as windows. So vLLM gives them blocks twice as long.
    "gemma4": Family(
        Gemma4TextConfig,
        {
            "num_hidden_layers": 6,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "global_head_dim": 64,
            "sliding_window": WINDOW_TOKENS,
            "hidden_size_per_layer_input": 0,
        },
        embedding_spread=0.3,
    ),
    "gpt_oss": Family(
        GptOssConfig,
        {
            "num_hidden_layers": 4,
            "head_dim": 64,
            "sliding_window": 128,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    # Multi-head latent attention. vLLM's CPU kernel knows latents of 512 values and 64 rotary ones alone.
    "deepseek": Family(
        DeepseekV3Config,
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 4,
            "first_k_dense_replace": 3,
            "moe_intermediate_size": 128,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": None,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
        },
        plain={"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    ),
    "olmo3": Family(Olmo3Config, {"num_hidden_layers": 4, "sliding_window": WINDOW_TOKENS}),
    "granite4h": Family(GraniteMoeHybridConfig, _GRANITE4H, weight_spread=1.5),
    # Of two tensor-parallel ranks, each has the same attention and half of the states.
    "granite4h_one_head": Family(GraniteMoeHybridConfig, _GRANITE4H | {"num_key_value_heads": 1}, weight_spread=1.5),
    "nemotron_h": Family(
        NemotronHConfig,
        {
            "layers_block_type": ["mamba", "mlp", "mamba", "attention", "mamba", "mlp"],
            "head_dim": 32,
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "ssm_state_size": 32,
            "n_groups": 1,
            "conv_kernel": 4,
            "expand": 2,
            "chunk_size": 64,
        },
        weight_spread=1.5,
    ),
    "falcon_h1": Family(
        FalconH1Config,
        {
            "num_hidden_layers": 3,
            "head_dim": 32,
            "mamba_d_ssm": 256,
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_d_state": 32,
            "mamba_n_groups": 1,
        },
        weight_spread=1.5,
    ),
    "lfm2": Family(
        Lfm2Config,
        {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"], "conv_L_cache": 3},
        plain={
            "conv_dim": 128,
            "conv_dim_out": 128,
            "conv_use_xavier_init": True,
            "block_dim": 128,
            "block_ff_dim": 256,
            "block_mlp_init_scale": 1.0,
            "block_norm_eps": 1e-5,
            "block_out_init_scale": 1.0,
            "block_use_swiglu": True,
            "block_use_xavier_init": True,
        },
        weight_spread=1.5,
    ),
    "qwen3_next": Family(
        Qwen3NextConfig,
        {
            "num_hidden_layers": 4,
            "head_dim": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 128,
        },
        dtype="bfloat16",  # vLLM requires it for gated delta nets on a CPU.
        weight_spread=1.5,
    ),
}


def make_model(family: str, directory: Path) -> Path:
    """Write the configuration, weights and tokenizer of a tiny model into `directory`, and return `directory`."""
    recipe = FAMILIES[family]
    config = recipe.config(**_COMMON | recipe.settings)
    config.dtype = getattr(torch, recipe.dtype)
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        has_images = isinstance(config, LlavaConfig)
        model = LlavaForConditionalGeneration(config) if has_images else AutoModelForCausalLM.from_config(config)
        _draw_weights(model, recipe)
    model.to(config.dtype).save_pretrained(directory)
    _add_plain_fields(directory / "config.json", recipe.plain)
    _write_tokenizer(directory)
    if has_images:
        _add_images(directory)
    return directory


def make_eagle(model: Path, directory: Path) -> Path:
    """Write an EAGLE draft model of one layer for a tiny Llama. It has the target's embedding and head."""
    config = json.loads((model / "config.json").read_text())
    weights = load_file(model / "model.safetensors")
    begin, names = "model.layers.0.", [".self_attn.", ".mlp.", ".post_attention_layernorm."]
    draft = {
        name.removeprefix("model."): weight.clone()
        for name, weight in weights.items()
        if name.startswith(begin) and any(part in name for part in names)
    }
    draft["fc.weight"] = _mixing_weight(config["hidden_size"], weights["lm_head.weight"].dtype)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(draft, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}, indent=2))
    return directory


def _mixing_weight(width: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a random matrix from an embedding and a hidden state to a hidden state."""
    generator = torch.Generator().manual_seed(SEED)
    return (torch.randn(width, 2 * width, generator=generator) / math.sqrt(2 * width)).to(dtype)


def _add_images(directory: Path) -> None:
    """Describe the image processor, and name the weights as vLLM expects them."""
    side = {"height": IMAGE_PIXELS, "width": IMAGE_PIXELS}
    size = {"size": {"shortest_edge": IMAGE_PIXELS}, "crop_size": side}
    described = {
        "processor_class": "LlavaProcessor",
        "image_processor": {"image_processor_type": "CLIPImageProcessor", **size},
        "image_token": "<image>",
        "num_additional_image_tokens": 1,
        "patch_size": PATCH_PIXELS,
        "vision_feature_select_strategy": "default",
    }
    (directory / "processor_config.json").write_text(json.dumps(described, indent=2))
    path = directory / "model.safetensors"
    weights = load_file(path)
    names = {name: name.replace("vision_tower.", "vision_tower.vision_model.") for name in weights}
    save_file({names[name]: weight for name, weight in weights.items()}, path, metadata={"format": "pt"})


def _draw_weights(model: Any, recipe: Family) -> None:
    """Replace matrices by normal noise and query norms by a constant; keep other vectors."""
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2:
                weight.copy_(torch.randn(weight.shape, generator=generator) * _scale(name, weight, recipe))
            elif "q_norm" in name:
                weight.fill_(QUERY_NORM)


def _scale(name: str, weight: torch.Tensor, recipe: Family) -> float:
    """Return the standard deviation of a matrix."""
    if "embed" in name:
        return recipe.embedding_spread
    sharp = "q_proj" in name or "k_proj" in name
    spread = HEAD_SPREAD if "lm_head" in name else QUERY_SPREAD if sharp else recipe.weight_spread
    return spread / math.sqrt(_fan_in(name, weight))


def _fan_in(name: str, weight: torch.Tensor) -> int:
    """Return the inputs per output of [out, in], [channel, 1, kernel], [expert, in, out] or [expert, out, in]."""
    if weight.dim() == 2 or "conv" in name:
        return math.prod(weight.shape[1:])
    return int(min(weight.shape[1:]))


def _add_plain_fields(path: Path, fields: dict[str, Any]) -> None:
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | fields, indent=2))


def _write_tokenizer(directory: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, "<s>", "</s>", "<pad>", "<image>", *(f"<{number}>" for number in range(IMAGE + 1, NUM_TOKENS))]
    tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<image>", special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_POSITIONS,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "chat_template": _CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(described, indent=2))
