"""Model folders that hold a config.json and no weights, for ``--load-format dummy``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class GatedDelta:
    """The recurrent layers of a hybrid target; every ``attention_every``-th layer is attention."""

    key_heads: int
    value_heads: int
    head_dim: int
    attention_every: int = 4
    conv_width: int = 4


@dataclass(frozen=True)
class Shape:
    """A Qwen3 target, or a Qwen3.5 one with recurrent layers, and the DFlash drafter for it; sizes only."""

    name: str
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context: int
    mask_token_id: int
    draft_layers: int
    block_size: int = 16
    recurrent: GatedDelta | None = None


# Qwen/Qwen3-8B, and a drafter of five of its layers.
QWEN3_8B = Shape(
    name="qwen3-8b-shape",
    hidden_size=4096,
    intermediate_size=12288,
    layers=36,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocab_size=151936,
    context=40960,
    mask_token_id=151669,
    draft_layers=5,
)
# Qwen/Qwen3.5-27B and Qwen3.6-27B, their text part: three layers of four are gated delta rules. A drafter of five of
# its attention layers.
QWEN36_27B = Shape(
    name="qwen3.6-27b-shape",
    hidden_size=5120,
    intermediate_size=17408,
    layers=64,
    heads=24,
    kv_heads=4,
    head_dim=256,
    vocab_size=248320,
    context=32768,
    mask_token_id=248317,
    draft_layers=5,
    recurrent=GatedDelta(key_heads=16, value_heads=48, head_dim=128),
)
# For smoke runs. SGLang's simulated acceptance commits token 100, which has to exist.
TINY = Shape(
    name="tiny-shape",
    hidden_size=64,
    intermediate_size=128,
    layers=6,
    heads=4,
    kv_heads=2,
    head_dim=16,
    vocab_size=320,
    context=2048,
    mask_token_id=300,
    draft_layers=2,
)


# By the name that a benchmark is given.
SHAPES = {"qwen3-8b": QWEN3_8B, "qwen3.6-27b": QWEN36_27B}


def spread_layers(layers: int, count: int) -> list[int]:
    """``count`` target layers for a drafter to read, evenly spread from the second to the third last."""
    first, last = 1, layers - 3
    assert 1 < count <= last - first + 1, f"cannot spread {count} layers over {first} to {last}"
    return [round(first + i * (last - first) / (count - 1)) for i in range(count)]


def _common(shape: Shape, dtype: str) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
    }


def _hybrid_config(shape: Shape, recurrent: GatedDelta, dtype: str) -> dict[str, Any]:
    """config.json of a Qwen3.5 target: its text part, and the least that SGLang accepts as an image encoder."""
    rope = {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25}
    text = {
        **_common(shape, dtype),
        "model_type": "qwen3_5_text",
        "num_hidden_layers": shape.layers,
        "full_attention_interval": recurrent.attention_every,
        "linear_num_key_heads": recurrent.key_heads,
        "linear_num_value_heads": recurrent.value_heads,
        "linear_key_head_dim": recurrent.head_dim,
        "linear_value_head_dim": recurrent.head_dim,
        "linear_conv_kernel_dim": recurrent.conv_width,
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
        "rope_parameters": {**rope, "mrope_section": [11, 11, 10], "mrope_interleaved": True},
        "bos_token_id": shape.vocab_size - 2,
        "eos_token_id": shape.vocab_size - 1,
    }
    special = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text,
        "vision_config": {
            "model_type": "qwen3_5",
            "depth": 1,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": shape.hidden_size,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [],
        },
        # Where no prompt of a benchmark has a token.
        **{name: shape.vocab_size - 16 + i for i, name in enumerate(special)},
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
    }


def target_config(shape: Shape, dtype: str = "bfloat16") -> dict[str, Any]:
    """config.json of the target."""
    if shape.recurrent is not None:
        return _hybrid_config(shape, shape.recurrent, dtype)
    return {
        "architectures": ["Qwen3ForCausalLM"],
        **_common(shape, dtype),
        "num_hidden_layers": shape.layers,
        # The last two ids; requests ignore the end of sequence anyway.
        "bos_token_id": shape.vocab_size - 2,
        "eos_token_id": shape.vocab_size - 1,
    }


def drafter_config(shape: Shape, dtype: str = "bfloat16") -> dict[str, Any]:
    """config.json of the DFlash drafter."""
    return {
        "architectures": ["DFlashDraftModel"],
        **_common(shape, dtype),
        "num_hidden_layers": shape.draft_layers,
        "num_target_layers": shape.layers,
        "block_size": shape.block_size,
        "dflash_config": {
            "mask_token_id": shape.mask_token_id,
            "target_layer_ids": spread_layers(shape.layers, shape.draft_layers),
        },
    }


def write_models(shape: Shape, folder: Path, dtype: str = "bfloat16") -> tuple[Path, Path]:
    """Write both folders below ``folder``; returns the target's and the drafter's."""
    paths = []
    for name, config in (("target", target_config(shape, dtype)), ("drafter", drafter_config(shape, dtype))):
        path = folder / f"{shape.name}-{name}"
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        paths.append(path)
    return paths[0], paths[1]
