"""Model folders that hold a config.json and no weights, for ``--load-format dummy``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Shape:
    """A Qwen3 target and the DFlash drafter for it; sizes only."""

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


def target_config(shape: Shape, dtype: str = "bfloat16") -> dict[str, Any]:
    """config.json of the target."""
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
