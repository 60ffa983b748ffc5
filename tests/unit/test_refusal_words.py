"""Refusals word for word, as the README's support table quotes them; test_requirements.py tries more values of each."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang
import tiny_models
import torch
from sglang.srt.plugins import load_plugins

load_plugins()

from sglang.srt import configs  # noqa: E402
from sglang.srt.configs.model_config import AttentionArch  # noqa: E402
from sglang.srt.managers.schedule_batch import Req  # noqa: E402
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402
from sglang_ddtree import activation, compat, overlay, requirements  # noqa: E402
from sglang_ddtree.flags import DDTreeConfig, FlagError, config_from  # noqa: E402
from test_requirements import check, edit_config, model_config, pretend_gpu, refusal_of  # noqa: E402
from transformers import Qwen3Config  # noqa: E402

overlay.lay()

from sglang.srt.speculative.ddtree_topk import local_vocabulary  # noqa: E402


def pretend(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    pretend_gpu(monkeypatch, device == "gpu")
    monkeypatch.setattr(requirements.cpu, "has_accelerator", lambda: device == "gpu")


# --- Flags: the same on a CPU and on a GPU ------------------------------------------------------------

FLAGS = [
    pytest.param(
        {"speculative_draft_model_path": None},
        marks=pytest.mark.feature(
            "drafter not given",
            refused="DDTREE needs --speculative-draft-model-path, got none. Give the path or name of a DFlash "
            "drafter for this target, e.g. z-lab/Qwen3-8B-DFlash-b16 for Qwen/Qwen3-8B.",
        ),
    ),
    pytest.param(
        {"pp_size": 2},
        marks=pytest.mark.feature(
            "`--pp-size`",
            refused="DDTREE does not support --pp-size 2: drafting needs every target layer on one rank. Use "
            "--tp-size.",
        ),
    ),
    pytest.param(
        {"dcp_size": 2},
        marks=pytest.mark.feature(
            "`--dcp-size`",
            refused="DDTREE does not support --dcp-size 2: SGLang's tree masks know no context parallelism. Use "
            "--tp-size.",
        ),
    ),
    pytest.param(
        {"attn_cp_size": 2},
        marks=pytest.mark.feature(
            "`--attn-cp-size`, `--enable-prefill-cp`",
            refused="DDTREE does not support --attn-cp-size 2: no rank has the drafter's features of a whole prompt. "
            "Use --tp-size.",
        ),
    ),
    pytest.param(
        {"moe_a2a_backend": "deepep"},
        marks=pytest.mark.feature(
            "`--moe-a2a-backend` other than none, `--moe-dense-tp-size`",
            refused="DDTREE does not support --moe-a2a-backend deepep: SGLang pads the batches of its ranks there, "
            "which has not been tried with trees. Use none, with --ep-size if experts are to be dealt out.",
        ),
    ),
    pytest.param(
        {"kv_canary": "log"},
        marks=pytest.mark.feature(
            "`--kv-canary`",
            refused="DDTREE does not support --kv-canary log: a tree moves KV slots, which it takes for damage. Use "
            "none.",
        ),
    ),
    pytest.param(
        {"enable_pdmux": True},
        marks=pytest.mark.feature(
            "`--enable-pdmux`",
            refused="DDTREE does not support --enable-pdmux: its prefill brings no features for the drafter. Drop the "
            "flag.",
        ),
    ),
    pytest.param(
        {"enable_dp_attention": True},
        marks=pytest.mark.feature(
            "`--enable-dp-attention`",
            refused="DDTREE does not support --enable-dp-attention: idle ranks have no tree to verify. Use "
            "--tp-size, or several servers.",
        ),
    ),
    pytest.param(
        {"disaggregation_mode": "prefill"},
        marks=pytest.mark.feature(
            "`--disaggregation-mode`",
            refused="DDTREE does not support --disaggregation-mode prefill: the drafter's KV cache is not "
            "transferred between servers. Serve prefill and decode from one server.",
        ),
    ),
    pytest.param(
        {"enable_lora": True},
        marks=pytest.mark.feature(
            "LoRA",
            refused="DDTREE does not support --enable-lora: the drafter knows only the base target. Drop LoRA or "
            "DDTREE.",
        ),
    ),
    pytest.param(
        {"tokenizer_worker_num": 2},
        marks=pytest.mark.feature(
            "`--tokenizer-worker-num` above 1",
            refused="DDTREE does not support --tokenizer-worker-num 2: SGLang loads no plugins in the extra HTTP "
            "workers. Use --tokenizer-worker-num 1.",
        ),
    ),
    pytest.param(
        {"kv_cache_dtype": "fp8_e4m3"},
        marks=pytest.mark.feature(
            "quantised KV cache by `--kv-cache-dtype`",
            refused="DDTREE does not support --kv-cache-dtype fp8_e4m3: tree verify with a quantised KV cache has "
            "not been proven exact. Use --kv-cache-dtype auto.",
        ),
    ),
    pytest.param(
        {"enable_return_routed_experts": True},
        marks=pytest.mark.feature(
            "`--enable-return-routed-experts`",
            refused="DDTREE does not support --enable-return-routed-experts: a tree moves KV slots, and the routing "
            "recorded for a slot would stay behind. Drop the flag.",
        ),
    ),
    pytest.param(
        {"enable_return_indexer_topk": True},
        marks=pytest.mark.feature(
            "`--enable-return-indexer-topk`",
            refused="DDTREE does not support --enable-return-indexer-topk: a tree moves KV slots, and the indices "
            "recorded for a slot would stay behind. Drop the flag.",
        ),
    ),
    pytest.param(
        {"enable_linear_replayssm_spec": True},
        marks=pytest.mark.feature(
            "`--enable-linear-replayssm-spec`",
            refused="DDTREE does not support --enable-linear-replayssm-spec: its kernel replays a chain. Drop the "
            "flag.",
        ),
    ),
    pytest.param(
        {"enable_memory_saver": True},
        marks=pytest.mark.feature(
            "`--enable-memory-saver`, with it `/release_memory_occupation`",
            refused="DDTREE does not support --enable-memory-saver: SGLang keeps no copy of the drafter's buffers "
            "while memory is released. Drop the flag.",
        ),
    ),
    pytest.param(
        {"enable_deterministic_inference": True},
        marks=pytest.mark.feature(
            "`--enable-deterministic-inference`",
            refused="DDTREE does not support --enable-deterministic-inference: the target's numbers depend on how "
            "many nodes and requests are verified together. Drop the flag.",
        ),
    ),
    pytest.param(
        {"speculative_num_steps": 3},
        marks=pytest.mark.feature(
            "`--speculative-num-steps`, `--speculative-eagle-topk`, `--speculative-num-draft-tokens`",
            refused="DDTREE does not support --speculative-num-steps 3: the tree's size follows from its own flags. "
            "Use --speculative-ddtree-budget and --speculative-ddtree-topk-cap.",
        ),
    ),
    pytest.param(
        {"speculative_draft_window_size": 512},
        marks=pytest.mark.feature(
            "`--speculative-draft-window-size`",
            refused="DDTREE does not support --speculative-draft-window-size 512: the compact draft cache is not "
            "implemented for trees. Drop the flag.",
        ),
    ),
    pytest.param(
        {"speculative_adaptive": True},
        marks=pytest.mark.feature(
            "`--speculative-adaptive`",
            refused="DDTREE does not support --speculative-adaptive: the tree's size follows from its own flags. Drop "
            "the flag.",
        ),
    ),
    pytest.param(
        {"speculative_dflash_block_size": 1},
        marks=pytest.mark.feature(
            "`--speculative-dflash-block-size` below 2",
            refused="DDTREE does not support --speculative-dflash-block-size 1: a block holds the last token and at "
            "least one draft. Use 2 or more, or drop the flag to read it from the drafter.",
        ),
    ),
    pytest.param(
        {"device": "xpu"},
        marks=pytest.mark.feature(
            "`--device` other than cuda and cpu",
            refused="DDTREE does not support --device xpu: it runs on NVIDIA GPUs, and on the CPU of a machine "
            "without a GPU. Use cuda or cpu.",
        ),
    ),
]


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("fields", FLAGS, ids=str)
def test_flags(fields: dict[str, Any], device: str, refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, device)
    assert refusal_of(**fields) == refused


# --- Flags: as the device is --------------------------------------------------------------------------

FLAGS_OF_A_DEVICE = [
    pytest.param(
        "cpu",
        {"attention_backend": "fa3"},
        marks=pytest.mark.feature(
            "attention backend `fa3`, `trtllm_mha`, `flex_attention`, ...",
            on="cpu",
            refused="DDTREE does not support --attention-backend fa3: only backends that apply a tree's ancestor "
            "mask can verify it (this server runs on the CPU). Use --attention-backend torch_native.",
        ),
    ),
    pytest.param(
        "gpu",
        {"attention_backend": "fa3"},
        marks=pytest.mark.feature(
            "attention backend `fa3`, `trtllm_mha`, `flex_attention`, ...",
            on="gpu",
            refused="DDTREE does not support --attention-backend fa3: only backends that apply a tree's ancestor "
            "mask can verify it. Use --attention-backend triton or flashinfer.",
        ),
    ),
    pytest.param(
        "cpu",
        {"attention_backend": "triton"},
        marks=pytest.mark.feature(
            "attention backend `triton` (a GPU's default)",
            on="cpu",
            refused="DDTREE does not support --attention-backend triton: only backends that apply a tree's ancestor "
            "mask can verify it (this server runs on the CPU). Use --attention-backend torch_native.",
        ),
    ),
    pytest.param(
        "gpu",
        {"attention_backend": "torch_native"},
        marks=pytest.mark.feature(
            "attention backend `torch_native` (a CPU's default)",
            on="gpu",
            refused="DDTREE does not support --attention-backend torch_native: only backends that apply a tree's "
            "ancestor mask can verify it. Use --attention-backend triton or flashinfer.",
        ),
    ),
    pytest.param(
        "cpu",
        {"page_size": 16},
        marks=pytest.mark.feature(
            "`--page-size` above 1 (16 and 64)",
            on="cpu",
            refused="DDTREE does not support --page-size 16: SGLang's paged allocator needs a GPU. Use --page-size 1.",
        ),
    ),
    pytest.param(
        "gpu",
        {"device": "cpu"},
        marks=pytest.mark.feature(
            "`--device cpu` on a machine with a GPU",
            on="gpu",
            refused="DDTREE does not support --device cpu: the stand-ins for SGLang's CPU kernels are used only "
            "where there is no GPU. Hide the GPU (CUDA_VISIBLE_DEVICES=) or drop the flag.",
        ),
    ),
]


@pytest.mark.parametrize("device, fields", FLAGS_OF_A_DEVICE, ids=str)
def test_flags_of_a_device(device: str, fields: dict[str, Any], refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, device)
    assert refusal_of(**fields) == refused


OWN_FLAGS = [
    pytest.param(
        {"speculative_ddtree_budget": 300},
        marks=pytest.mark.feature(
            "budget outside 1 to 256",
            refused="--speculative-ddtree-budget must be auto, or an integer of at least 1 and at most 256, got 300.",
        ),
    ),
    pytest.param(
        {"speculative_ddtree_budget": "auto", "speculative_ddtree_max_budget": 64},
        marks=pytest.mark.feature(
            "budget auto with a bound outside 1 to 63",
            refused="--speculative-ddtree-max-budget must be an integer of at least 1 and at most 63, got 64.",
        ),
    ),
    pytest.param(
        {"speculative_ddtree_budget": 15, "speculative_ddtree_max_budget": 31},
        marks=pytest.mark.feature(
            "`--speculative-ddtree-max-budget` with a budget that is a number",
            refused="--speculative-ddtree-max-budget 31 needs --speculative-ddtree-budget auto, got 15. Give "
            "--speculative-ddtree-budget auto, or drop the flag.",
        ),
    ),
    pytest.param(
        {"speculative_ddtree_budget": "auto", "speculative_ddtree_shadow_linear": True},
        marks=pytest.mark.feature(
            "budget auto with `--speculative-ddtree-shadow-linear`",
            refused="DDTREE does not support --speculative-ddtree-budget auto here: with "
            "--speculative-ddtree-shadow-linear every request's chain has one size. Drop one of the two, or give a "
            "number, e.g. --speculative-ddtree-budget 15.",
        ),
    ),
    pytest.param(
        {"speculative_ddtree_topk_cap": 0},
        marks=pytest.mark.feature(
            "cap below 1", refused="--speculative-ddtree-topk-cap must be an integer of at least 1, got 0."
        ),
    ),
    pytest.param(
        {"speculative_ddtree_budget": 128, "speculative_ddtree_topk_cap": 100},
        marks=pytest.mark.feature(
            "budget and cap above 64",
            refused="--speculative-ddtree-topk-cap must be at most 64 with a budget above 64, got 100 with budget "
            "128. Use --speculative-ddtree-topk-cap 64 or less.",
        ),
    ),
]


@pytest.mark.parametrize("values", OWN_FLAGS, ids=str)
def test_own_flags(values: dict[str, Any], refused: str) -> None:
    with pytest.raises(FlagError) as error:
        config_from(values)
    assert str(error.value) == refused


@pytest.mark.feature(
    "budget auto with the attention backend `flashinfer`",
    on="gpu",
    refused="DDTREE does not support --speculative-ddtree-budget auto here: --attention-backend flashinfer cannot "
    "verify trees of different sizes in one batch. Use --attention-backend triton, or give a number, e.g. "
    "--speculative-ddtree-budget 15.",
)
def test_auto_and_a_backend_of_one_width(refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "gpu")
    with pytest.raises(FlagError) as error:
        requirements.settle_auto_by_fields(DDTreeConfig(auto=True), {"attention_backend": "flashinfer"})
    assert str(error.value) == refused


@pytest.mark.feature(
    "budget auto with a hybrid target whose recurrent layers are not GDN",
    on="gpu",
    refused="DDTREE does not support --speculative-ddtree-budget auto here: the target org/target has recurrent "
    "layers of type Mamba2, which were not shown to follow trees of changing size. Serve a target of attention alone, "
    "or with GDN layers, or give a number, e.g. --speculative-ddtree-budget 15.",
)
def test_auto_and_a_hybrid_target(refused: str) -> None:
    target, arguments = model_config(configs.NemotronHConfig()), SimpleNamespace(model_path="org/target")
    with pytest.raises(FlagError) as error:
        requirements.settle_auto_by_target(DDTreeConfig(auto=True), arguments, target)
    assert str(error.value) == refused


# --- The two checkpoints ------------------------------------------------------------------------------

TARGETS = [
    # Recurrent state after a prefix hit, after a round without drafts, and slots that cut concurrency (sglang #34043,
    # vllm #52942, sglang #36889) cannot go wrong where no tree runs.
    pytest.param(
        configs.KimiLinearConfig,
        {},
        marks=pytest.mark.feature(
            "hybrid targets with KDA, Lightning or short convolution layers, Falcon-H1, Jet-Nemotron: in tree mode",
            on="gpu",
            refused="DDTREE: the target org/target has recurrent layers of type Kimi delta attention (KDA), whose "
            "state a tree can corrupt: its states in a tree have not been proven exact. "
            "--speculative-ddtree-shadow-linear serves DFLASH's chain, which is always safe; "
            "--speculative-ddtree-allow-hybrid-unsafe runs the tree anyway, and its output may differ from the "
            "target's own.",
        ),
    ),
    pytest.param(
        Qwen3Config,
        {"attention_arch": AttentionArch.MLA},
        marks=pytest.mark.feature(
            "MLA targets in tree mode",
            refused="DDTREE: the target org/target uses multi-head latent attention (MLA), where a backend may "
            "ignore a tree's mask. Serve the chain with --speculative-ddtree-shadow-linear, or drop DDTREE.",
        ),
    ),
    pytest.param(
        Qwen3Config,
        {"is_hybrid_swa": True},
        marks=pytest.mark.feature(
            "sliding-window targets in tree mode",
            refused="DDTREE: the target org/target uses sliding-window attention, and SGLang's backends count the "
            "window by node instead of by position. Serve the chain with --speculative-ddtree-shadow-linear, or drop "
            "DDTREE.",
        ),
    ),
]


@pytest.mark.parametrize("make, fields", TARGETS)
def test_targets(make: Any, fields: dict[str, Any], refused: str, tmp_path: Path) -> None:
    drafter = tiny_models.make_drafter(tmp_path / "drafter")
    with pytest.raises(FlagError) as error:
        check(model_config(make(), **fields), drafter)
    assert str(error.value) == refused


@pytest.mark.feature(
    "hybrid targets",
    on="cpu",
    refused="DDTREE: the target org/target has recurrent layers of type gated delta rule (GDN), and SGLang keeps the "
    "states of a verify on a GPU. On a CPU neither --speculative-ddtree-shadow-linear nor "
    "--speculative-ddtree-allow-hybrid-unsafe helps. Use a GPU, or drop DDTREE.",
)
def test_hybrid_targets_on_a_cpu(refused: str, tmp_path: Path) -> None:
    drafter = tiny_models.make_drafter(tmp_path / "drafter")
    with pytest.raises(FlagError) as error:
        check(model_config(configs.Qwen3NextConfig()), drafter, {"device": "cpu"})
    assert str(error.value) == refused


@pytest.mark.feature(
    "quantised KV cache of a checkpoint",
    refused="DDTREE: the target org/target brings a quantised KV cache (torch.float8_e4m3fn), with which tree verify "
    "has not been proven exact. Give --kv-cache-dtype bfloat16.",
)
def test_a_checkpoints_kv_cache(refused: str) -> None:
    runner = SimpleNamespace(sliding_window_size=None, kv_cache_dtype=torch.float8_e4m3fn)
    with pytest.raises(FlagError) as error:
        requirements.check_loaded_target(SimpleNamespace(model_path="org/target"), runner, DDTreeConfig())
    assert str(error.value) == refused


# Each under a name of its own: SGLang remembers the config that it has read from a path.
DRAFTERS = [
    pytest.param(
        "other",
        {"architectures": ["Qwen3ForCausalLM"]},
        marks=pytest.mark.feature(
            "drafter that is no DFlash checkpoint",
            refused="DDTREE needs a DFlash drafter, but --speculative-draft-model-path other holds "
            "['Qwen3ForCausalLM']. Give a checkpoint whose config.json names DFlashDraftModel.",
        ),
    ),
    pytest.param(
        "narrow",
        {"hidden_size": 32},
        marks=pytest.mark.feature(
            "drafter of another hidden size",
            refused="--speculative-draft-model-path narrow has hidden_size 32, the target org/target has 64. Use the "
            "drafter that was trained for this target.",
        ),
    ),
    pytest.param(
        "deep",
        {"dflash_config": {"mask_token_id": 300, "target_layer_ids": [0, 9]}},
        marks=pytest.mark.feature(
            "drafter that reads layers which the target lacks",
            refused="--speculative-draft-model-path deep reads target layers [0, 9], but the target org/target has "
            "layers 0 to 3. Use the drafter that was trained for this target.",
        ),
    ),
]


@pytest.mark.parametrize("name, changes", DRAFTERS, ids=str)
def test_drafters(
    name: str, changes: dict[str, Any], refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    edit_config(tiny_models.make_drafter(tmp_path / name), **changes)
    with pytest.raises(FlagError) as error:
        check(model_config(Qwen3Config()), name)
    assert str(error.value) == refused


HEADS = [
    pytest.param(
        torch.int8,
        0,
        marks=pytest.mark.feature(
            "`lm_head` quantised",
            refused="DDTREE needs an unquantised lm_head: the drafter's probabilities are computed with it.",
        ),
    ),
    pytest.param(
        torch.float32,
        1,
        marks=pytest.mark.feature(
            "`lm_head` with added vocabulary",
            refused="DDTREE does not support an lm_head with added vocabulary (e.g. from LoRA).",
        ),
    ),
]


@pytest.mark.parametrize("dtype, added", HEADS, ids=str)
def test_heads(dtype: torch.dtype, added: int, refused: str) -> None:
    shard = SimpleNamespace(num_org_elements=8, org_vocab_start_index=0, num_added_elements=added)
    with pytest.raises(ValueError) as error:
        local_vocabulary(SimpleNamespace(weight=torch.zeros(8, 4, dtype=dtype), shard_indices=shard))
    assert str(error.value) == refused


@pytest.mark.feature(
    "SGLang of another version, or with other internals",
    refused="DDTREE cannot start: SGLang 0.5.16 is installed. Supported SGLang versions: 0.5.17. Install one with: "
    "pip install sglang==0.5.17",
)
def test_another_sglang(refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang, "__version__", "0.5.16")
    with pytest.raises(compat.UnsupportedSGLang) as error:
        compat.check()
    assert str(error.value) == refused


# --- Requests: HTTP 400. test_http.py sends the penalties and min_tokens -------------------------------

REQUESTS = [
    pytest.param(
        {"return_hidden_states": True},
        marks=pytest.mark.feature(
            "request: hidden states",
            refused="DDTREE speculative decoding does not support return_hidden_states yet. Drop it, or use a server "
            "without speculation.",
        ),
    ),
    pytest.param(
        {"custom_logit_processor": "{...}"},
        marks=pytest.mark.feature(
            "request: custom logit processor",
            refused="DDTREE speculative decoding does not support custom_logit_processor yet. Drop it, or use a "
            "server without speculation.",
        ),
    ),
    pytest.param(
        {"return_sampling_mask": True},
        marks=pytest.mark.feature(
            "request: `return_sampling_mask`",
            refused="DDTREE speculative decoding does not support return_sampling_mask yet. Drop it, or use a server "
            "without speculation.",
        ),
    ),
    pytest.param(
        {"session": object()},
        marks=pytest.mark.feature(
            "request: session",
            refused="DDTREE speculative decoding does not support session_params yet. Drop it, or use a server "
            "without speculation.",
        ),
    ),
    pytest.param(
        {"origin_input_ids": [65, 320]},
        marks=pytest.mark.feature(
            "request: token ids outside the vocabulary", refused="input_ids must be from 0 to 319, got 65 to 320."
        ),
    ),
    pytest.param(
        {"top_logprobs_num": 1000},
        marks=pytest.mark.feature(
            "request: `top_logprobs_num` above the vocabulary",
            refused="top_logprobs_num must be an integer from 0 to 320, got 1000.",
        ),
    ),
]


@pytest.mark.parametrize("fields", REQUESTS, ids=lambda fields: next(iter(fields)))
def test_requests(fields: dict[str, Any], refused: str) -> None:
    request = Req("r", "", [1, 2, 3], SamplingParams(), vocab_size=320)
    fields = dict(fields)
    request.logprob.top_logprobs_num = fields.pop("top_logprobs_num", 0)
    for name, value in fields.items():
        assert hasattr(request, name)
        setattr(request, name, value)
    assert activation._validate_request_hook(None, request, True) == refused


@pytest.mark.feature(
    "request: images",
    refused="DDTREE speculative decoding does not support multimodal inputs yet. Drop it, or use a server without "
    "speculation.",
)
def test_images(refused: str) -> None:
    said: list[str] = []
    request = SimpleNamespace(set_finish_with_abort=said.append)
    activation._image_inputs_hook(lambda req, images: None, request, "images")
    assert said == [refused]
