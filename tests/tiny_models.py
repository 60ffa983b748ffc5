"""Tiny random models for the tests: targets, DFlash drafters and a tokenizer, made on the spot.

Two to four layers, a vocabulary of a few hundred tokens, no download.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3Config,
    Qwen3NextConfig,
)

VOCABULARY = 320
HIDDEN = 64
MASK_TOKEN_ID = 300
EOS_TOKEN_ID = 257

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer: one token per byte, then the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    vocabulary["<|bos|>"], vocabulary["<|eos|>"] = 256, EOS_TOKEN_ID
    for index in range(EOS_TOKEN_ID + 1, VOCABULARY):
        vocabulary[f"<|extra{index}|>"] = index
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|bos|>", eos_token="<|eos|>", chat_template=_CHAT_TEMPLATE
    )
    tokenizer.save_pretrained(folder)


def make_target(
    folder: Path,
    kind: str = "qwen3",
    *,
    layers: int = 4,
    seed: int = 0,
    context: int = 512,
    scale: float = 4.0,
) -> Path:
    """A random target with a tokenizer.

    Args:
        folder: written to.
        kind: "qwen3", "llama", or "mrope": a Qwen3 whose positions SGLang makes three of, as for images.
        layers: decoder layers; DFLASH's choice of captured layers needs at least 4.
        seed: of the weights.
        context: positions.
        scale: factor on the initial weights; at 1 a random model repeats one token, larger is livelier.
    """
    torch.manual_seed(seed)
    shared = dict(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        bos_token_id=256,
        eos_token_id=EOS_TOKEN_ID,
        tie_word_embeddings=False,
        initializer_range=0.02 * scale,
        torch_dtype="float32",
    )
    if kind == "qwen3":
        config = Qwen3Config(head_dim=16, **shared)
    elif kind == "mrope":
        rope = dict(rope_type="default", rope_theta=10000.0, mrope_section=[4, 2, 2])
        config = Qwen3Config(head_dim=16, rope_parameters=rope, **shared)
    elif kind == "llama":
        config = LlamaConfig(**shared)
    else:
        raise ValueError(f"kind must be qwen3, llama or mrope, got {kind!r}")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def make_hybrid(
    folder: Path,
    kind: str = "qwen3.5",
    *,
    layers: int = 8,
    seed: int = 0,
    context: int = 512,
    scale: float = 4.0,
    dtype: str = "float32",
) -> Path:
    """A random target in which three layers of four are recurrent (gated delta rule), with a tokenizer.

    Args:
        folder: written to.
        kind: "qwen3.5" (dense, positions as for images) or "qwen3-next" (a mixture of experts in every layer).
        layers: a multiple of 4.
        seed, context, scale: as for `make_target`.
        dtype: of the checkpoint.
    """
    torch.manual_seed(seed)
    every = 4
    text = dict(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_conv_kernel_dim=4,
        layer_types=["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(layers)],
        rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.25),
        max_position_embeddings=context,
        bos_token_id=256,
        eos_token_id=EOS_TOKEN_ID,
        tie_word_embeddings=False,
        initializer_range=0.02 * scale,
    )
    if kind == "qwen3.5":
        text["rope_parameters"] |= dict(mrope_section=[2, 1, 1], mrope_interleaved=True)
        # As small as it may be: no test sends an image.
        vision = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=HIDDEN)
        vision |= dict(num_position_embeddings=16, deepstack_visual_indexes=[])
        ids = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        special = {name: 301 + i for i, name in enumerate(ids)}
        config = Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=False, **special)
        model = Qwen3_5ForConditionalGeneration._from_config(config, dtype=getattr(torch, dtype))
    elif kind == "qwen3-next":
        experts = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64)
        config = Qwen3NextConfig(**text, **experts, shared_expert_intermediate_size=64)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    else:
        raise ValueError(f"kind must be qwen3.5 or qwen3-next, got {kind!r}")
    model.save_pretrained(folder)
    # transformers derives this from the layers' types; SGLang reads it.
    path = folder / "config.json"
    content = json.loads(path.read_text())
    content.get("text_config", content)["full_attention_interval"] = every
    path.write_text(json.dumps(content, indent=1))
    save_tokenizer(folder)
    return folder


def make_drafter(
    folder: Path,
    *,
    target_layers: int = 4,
    layer_ids: tuple[int, ...] = (0, 1, 2),
    block_size: int = 8,
    layers: int = 2,
    hidden: int = HIDDEN,
    seed: int = 1,
    architecture: str = "DFlashDraftModel",
) -> Path:
    """A random DFlash drafter in the checkpoint format that SGLang's DFlashDraftModel loads."""
    generator = torch.Generator().manual_seed(seed)
    heads, kv_heads, head_dim, inner = 4, 2, 16, 128

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * 0.1

    weights = {
        "fc.weight": matrix(hidden, hidden * len(layer_ids)),
        "hidden_norm.weight": torch.ones(hidden),
        "norm.weight": torch.ones(hidden),
    }
    for i in range(layers):
        at = f"layers.{i}."
        weights |= {
            at + "input_layernorm.weight": torch.ones(hidden),
            at + "post_attention_layernorm.weight": torch.ones(hidden),
            at + "self_attn.q_proj.weight": matrix(heads * head_dim, hidden),
            at + "self_attn.k_proj.weight": matrix(kv_heads * head_dim, hidden),
            at + "self_attn.v_proj.weight": matrix(kv_heads * head_dim, hidden),
            at + "self_attn.o_proj.weight": matrix(hidden, heads * head_dim),
            at + "self_attn.q_norm.weight": torch.ones(head_dim),
            at + "self_attn.k_norm.weight": torch.ones(head_dim),
            at + "mlp.gate_proj.weight": matrix(inner, hidden),
            at + "mlp.up_proj.weight": matrix(inner, hidden),
            at + "mlp.down_proj.weight": matrix(hidden, inner),
        }
    config = {
        "architectures": [architecture],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": VOCABULARY,
        "num_target_layers": target_layers,
        "block_size": block_size,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 8192,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "dflash_config": {"mask_token_id": MASK_TOKEN_ID, "target_layer_ids": list(layer_ids)},
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def main() -> None:
    """Write a pair for a manual try: python tests/tiny_models.py FOLDER [qwen3|llama|qwen3.5|qwen3-next]."""
    import sys

    folder, kind = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "qwen3"
    if kind in ("qwen3.5", "qwen3-next"):
        make_hybrid(folder / "target", kind)
        make_drafter(folder / "drafter", target_layers=8, layer_ids=(1, 3, 5))
    else:
        make_target(folder / "target", kind)
        make_drafter(folder / "drafter")


if __name__ == "__main__":
    main()
