"""Bad input: the launch command ends with an error that names flag, value and remedy, exit code not 0."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models
from serving import HERE, environment

# name: (flags added to a good command, words the error must contain). A value of None drops the flag.
CASES: dict[str, tuple[dict[str, str | None], list[str]]] = {
    "budget 0": (
        {"--speculative-ddtree-budget": "0"},
        ["--speculative-ddtree-budget", "got 0", "at least 1"],
    ),
    "budget negative": (
        {"--speculative-ddtree-budget": "-3"},
        ["--speculative-ddtree-budget", "got -3", "at least 1"],
    ),
    "budget text": (
        {"--speculative-ddtree-budget": "many"},
        ["--speculative-ddtree-budget", "'many'", "integer"],
    ),
    "cap 0": (
        {"--speculative-ddtree-topk-cap": "0"},
        ["--speculative-ddtree-topk-cap", "got 0", "at least 1"],
    ),
    "cap above the vocabulary": (
        {"--speculative-ddtree-topk-cap": "321"},
        ["--speculative-ddtree-topk-cap", "got 321", "at most", "320"],
    ),
    "no drafter": (
        {"--speculative-draft-model-path": None},
        ["--speculative-draft-model-path", "got none", "Give the path"],
    ),
    "a drafter that is no DFlash checkpoint": (
        {"--speculative-draft-model-path": "{target}"},
        ["--speculative-draft-model-path", "Qwen3ForCausalLM", "DFlashDraftModel"],
    ),
    "a drafter that is not there": (
        {"--speculative-draft-model-path": "/nowhere/drafter"},
        ["--speculative-draft-model-path", "/nowhere/drafter"],
    ),
    "a drafter of another hidden size": (
        {"--speculative-draft-model-path": "{narrow}"},
        ["--speculative-draft-model-path", "hidden_size 32", "64", "trained for this target"],
    ),
    "a drafter that reads missing layers": (
        {"--speculative-draft-model-path": "{deep}"},
        ["--speculative-draft-model-path", "layers", "9", "trained for this target"],
    ),
    "trtllm_mha": (
        {"--attention-backend": "trtllm_mha"},
        ["--attention-backend", "trtllm_mha", "Use --attention-backend"],
    ),
    "flex_attention": (
        {"--attention-backend": "flex_attention"},
        ["--attention-backend", "flex_attention", "Use --attention-backend"],
    ),
    "pipeline parallelism": ({"--pp-size": "2"}, ["--pp-size 2", "Use --tp-size"]),
    "data-parallel attention": (
        {"--enable-dp-attention": "", "--dp-size": "2", "--tp-size": "2"},
        ["--enable-dp-attention", "Use"],
    ),
    "disaggregation": (
        {"--disaggregation-mode": "decode"},
        ["--disaggregation-mode decode", "Serve prefill and decode"],
    ),
    "LoRA": ({"--enable-lora": "", "--max-lora-rank": "8"}, ["--enable-lora", "Drop LoRA or DDTREE"]),
    "several tokenizer workers": (
        {"--tokenizer-worker-num": "2"},
        ["--tokenizer-worker-num 2", "Use --tokenizer-worker-num 1"],
    ),
    "EAGLE's flags": (
        {"--speculative-num-steps": "3"},
        ["--speculative-num-steps 3", "--speculative-ddtree-budget"],
    ),
    "quantised KV cache": ({"--kv-cache-dtype": "fp8_e4m3"}, ["--kv-cache-dtype fp8_e4m3", "auto"]),
    "flags without the algorithm": (
        {
            "--speculative-algorithm": None,
            "--speculative-draft-model-path": None,
            "--speculative-ddtree-budget": "7",
        },
        ["--speculative-ddtree-budget", "--speculative-algorithm DDTREE"],
    ),
    "hybrid target": (
        {"--model-path": "{hybrid}"},
        [
            "gated delta rule",
            "--speculative-ddtree-shadow-linear",
            "--speculative-ddtree-allow-hybrid-unsafe",
        ],
    ),
}


def make_hybrid_config(folder: Path) -> None:
    """A Qwen3-Next config: recurrent layers beside attention. No weights: the refusal comes before."""
    from transformers import Qwen3NextConfig

    config = Qwen3NextConfig(
        vocab_size=tiny_models.VOCABULARY,
        hidden_size=tiny_models.HIDDEN,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        architectures=["Qwen3NextForCausalLM"],
    )
    config.save_pretrained(folder)
    content = json.loads((folder / "config.json").read_text())
    # transformers derives this field; SGLang reads it.
    content.update(full_attention_interval=4, architectures=["Qwen3NextForCausalLM"])
    (folder / "config.json").write_text(json.dumps(content))
    tiny_models.save_tokenizer(folder)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    folder = tmp_path_factory.mktemp("refusals")
    paths = {name: folder / name for name in ("target", "drafter", "narrow", "deep", "hybrid")}
    tiny_models.make_target(paths["target"])
    tiny_models.make_drafter(paths["drafter"])
    tiny_models.make_drafter(paths["narrow"], hidden=32)
    tiny_models.make_drafter(paths["deep"], layer_ids=(1, 5, 9))
    make_hybrid_config(paths["hybrid"])
    launches = []
    for changes, _ in CASES.values():
        flags: dict[str, str | None] = {
            "--model-path": "{target}",
            "--speculative-algorithm": "DDTREE",
            "--speculative-draft-model-path": "{drafter}",
            **changes,
        }
        command: list[str] = []
        for flag, value in flags.items():
            if value is not None:
                command += [flag] if value == "" else [flag, value.format(**paths)]
        launches.append(command)
    result = folder / "outcomes.json"
    subprocess.run(
        [sys.executable, str(HERE / "server" / "refusal_runner.py"), str(result)],
        input=json.dumps(launches),
        text=True,
        check=True,
        env=environment(),
        timeout=900,
        capture_output=True,
    )
    return {name: tuple(found) for name, found in zip(CASES, json.loads(result.read_text()), strict=True)}


@pytest.mark.parametrize("name", CASES)
def test_refused_at_start(outcomes: dict[str, tuple[int, str]], name: str) -> None:
    code, output = outcomes[name]
    assert code != 0, output[-2000:]
    last = output[-3000:]
    for words in CASES[name][1]:
        assert words in last, f"{words!r} is not in:\n{last}"
