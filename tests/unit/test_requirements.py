"""What DDTREE refuses to start with: every message names the flag, its value and a remedy."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import tiny_models
import torch
from sglang.srt.plugins import load_plugins

load_plugins()

from sglang.srt import configs  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402
from sglang_ddtree import activation, hybrid, overlay, requirements  # noqa: E402
from sglang_ddtree.flags import DDTreeConfig, FlagError  # noqa: E402
from transformers import LlamaConfig, Qwen3Config  # noqa: E402

overlay.lay()

from sglang.srt.layers.attention import attention_registry  # noqa: E402
from sglang.srt.layers.attention.triton_tree_backend import TritonTreeMaskAttnBackend  # noqa: E402

CAP = "--speculative-ddtree-topk-cap"
SHADOW, UNSAFE = "--speculative-ddtree-shadow-linear", "--speculative-ddtree-allow-hybrid-unsafe"
OWN_FLAGS = "Use --speculative-ddtree-budget and --speculative-ddtree-topk-cap."


def pretend_gpu(monkeypatch, there=True):
    """A Hopper GPU, or none."""
    monkeypatch.setattr(requirements, "has_gpu", lambda: there)
    # Nor another accelerator, whatever this machine has.
    monkeypatch.setattr(requirements.cpu, "has_accelerator", lambda: there)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu_id=0: (9, 0))


@pytest.fixture(params=[True, False], ids=["gpu", "cpu"])
def gpu(request, monkeypatch):
    pretend_gpu(monkeypatch, request.param)
    return request.param


def refusal_of(**fields):
    given = dict(speculative_draft_model_path="org/drafter") | fields
    with pytest.raises(FlagError) as error:
        requirements.check_fields(given)
    return str(error.value)


def passes(**fields):
    given = dict(speculative_draft_model_path="org/drafter") | fields
    return requirements.check_fields(given) is None


# --- The arguments as given -------------------------------------------------------------------------

# field, value, what the message calls it, remedy; the same with and without a GPU.
REFUSED = [
    ("device", "xpu", "--device xpu", "Use cuda or cpu."),
    ("device", "npu", "--device npu", "Use cuda or cpu."),
    ("pp_size", 2, "--pp-size 2", "Use --tp-size."),
    ("enable_dp_attention", True, "--enable-dp-attention", "Use --tp-size, or several servers."),
    ("disaggregation_mode", "prefill", "--disaggregation-mode prefill", "Serve prefill and decode from one server."),
    ("disaggregation_mode", "decode", "--disaggregation-mode decode", "Serve prefill and decode from one server."),
    ("enable_lora", True, "--enable-lora", "Drop LoRA or DDTREE."),
    ("lora_paths", ["a=b"], "--lora-paths", "Drop LoRA or DDTREE."),
    ("tokenizer_worker_num", 2, "--tokenizer-worker-num 2", "Use --tokenizer-worker-num 1."),
    ("speculative_draft_window_size", 512, "--speculative-draft-window-size 512", "Drop the flag."),
    ("speculative_draft_window_size", 0, "--speculative-draft-window-size 0", "Drop the flag."),
    ("speculative_adaptive", True, "--speculative-adaptive", "Drop the flag."),
    ("enable_return_routed_experts", True, "--enable-return-routed-experts", "Drop the flag."),
    ("enable_return_indexer_topk", True, "--enable-return-indexer-topk", "Drop the flag."),
    ("enable_linear_replayssm_spec", True, "--enable-linear-replayssm-spec", "Drop the flag."),
    ("enable_deterministic_inference", True, "--enable-deterministic-inference", "Drop the flag."),
    ("enable_memory_saver", True, "--enable-memory-saver", "Drop the flag."),
    ("rl_on_policy_target", "fsdp", "--rl-on-policy-target fsdp", "Drop the flag."),
    ("enable_pdmux", True, "--enable-pdmux", "Drop the flag."),
    ("kv_canary", "log", "--kv-canary log", "Use none."),
    ("dcp_size", 2, "--dcp-size 2", "Use --tp-size."),
    ("attn_cp_size", 2, "--attn-cp-size 2", "Use --tp-size."),
    ("enable_prefill_cp", True, "--enable-prefill-cp", "Use --tp-size."),
    ("enable_prefill_context_parallel", True, "--enable-prefill-context-parallel", "Use --tp-size."),
    ("moe_dense_tp_size", 1, "--moe-dense-tp-size 1", "Drop the flag."),
    ("moe_a2a_backend", "deepep", "--moe-a2a-backend deepep", "Use none, with --ep-size"),
    (
        "speculative_draft_attention_backend",
        "fa4",
        "--speculative-draft-attention-backend fa4",
        "Use --attention-backend",
    ),
    ("kv_cache_dtype", "fp8_e4m3", "--kv-cache-dtype fp8_e4m3", "Use --kv-cache-dtype auto."),
    ("kv_cache_dtype", "fp8_e5m2", "--kv-cache-dtype fp8_e5m2", "Use --kv-cache-dtype auto."),
    # sglang #36001: None in verify.
    ("kv_cache_dtype", "fp4_e2m1", "--kv-cache-dtype fp4_e2m1", "Use --kv-cache-dtype auto."),
    ("speculative_num_steps", 3, "--speculative-num-steps 3", OWN_FLAGS),
    ("speculative_eagle_topk", 4, "--speculative-eagle-topk 4", OWN_FLAGS),
    ("speculative_num_draft_tokens", 16, "--speculative-num-draft-tokens 16", OWN_FLAGS),
    ("speculative_dflash_block_size", 1, "--speculative-dflash-block-size 1", "Use 2 or more, or drop the flag"),
    ("speculative_dflash_block_size", 0, "--speculative-dflash-block-size 0", "Use 2 or more, or drop the flag"),
]


@pytest.mark.parametrize("field, value, named, remedy", REFUSED)
def test_refused_field(field, value, named, remedy, gpu):
    message = refusal_of(**{field: value})
    assert message.startswith(f"DDTREE does not support {named}") or field == "lora_paths"
    assert named in message and remedy in message


@pytest.mark.parametrize("path", [None, ""])
def test_a_drafter_is_required(path, gpu):
    message = refusal_of(speculative_draft_model_path=path)
    assert "--speculative-draft-model-path, got none" in message
    assert "Give the path or name of a DFlash drafter" in message


ATTENTION_FLAGS = ["attention_backend", "prefill_attention_backend", "decode_attention_backend"]


@pytest.mark.parametrize("field", ATTENTION_FLAGS)
@pytest.mark.parametrize("backend", ["fa3", "trtllm_mha", "flex_attention", "aiter", "intel_amx"])
def test_refused_backend(field, backend, gpu):
    message = refusal_of(**{field: backend})
    assert f"--{field.replace('_', '-')} {backend}" in message and "ancestor mask" in message
    remedy = "triton or flashinfer" if gpu else "torch_native"
    assert message.endswith(f"Use --attention-backend {remedy}.")
    assert ("this server runs on the CPU" in message) == (not gpu)


@pytest.mark.parametrize("field", ATTENTION_FLAGS)
def test_backends_of_the_other_device(field, gpu):
    for backend in ("triton", "flashinfer"):
        assert (
            passes(**{field: backend})
            if gpu
            else "Use --attention-backend torch_native." in refusal_of(**{field: backend})
        )
    if gpu:
        assert "triton or flashinfer" in refusal_of(**{field: "torch_native"})
    else:
        assert passes(**{field: "torch_native"})


def test_a_cpu_server_beside_a_gpu(monkeypatch):
    pretend_gpu(monkeypatch)
    message = refusal_of(device="cpu")
    assert "--device cpu" in message and "Hide the GPU" in message and "drop the flag" in message
    pretend_gpu(monkeypatch, there=False)
    assert passes(device="cpu")


@pytest.mark.parametrize("size", [2, 16, 64])
def test_pages_need_a_gpu(size, gpu):
    if gpu:
        assert passes(page_size=size)
    else:
        message = refusal_of(page_size=size)
        assert f"--page-size {size}" in message and message.endswith("Use --page-size 1.")


def test_simulated_acceptance_with_real_draft_tokens(monkeypatch):
    """The length may be forced, a tree's tokens not."""
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_TOKEN_MODE", "real-draft-token")
    for off in ("", "-1", "0"):
        monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", off)
        assert passes()
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "2.5")
    message = refusal_of()
    assert "SGLANG_SIMULATE_ACC_TOKEN_MODE real-draft-token" in message
    assert message.endswith("Use fixed, or unset SGLANG_SIMULATE_ACC_LEN.")
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_TOKEN_MODE", "fixed")
    assert passes()


HARMLESS = [
    {},
    dict(device="auto"),
    dict(pp_size=1, tp_size=2, dp_size=2, tokenizer_worker_num=1, page_size=1),
    dict(disaggregation_mode="null", enable_lora=False, lora_paths=[], enable_dp_attention=False),
    dict(kv_cache_dtype="auto"),
    dict(kv_cache_dtype="bfloat16"),
    dict(speculative_dflash_block_size=2, speculative_num_steps=None, speculative_adaptive=False),
]


def test_a_gpu_that_is_not_there(gpu):
    asked = dict(device="cuda", attention_backend="triton")
    if gpu:
        assert passes(**asked)
    else:
        assert "--device cuda" in refusal_of(**asked)


@pytest.mark.parametrize("fields", HARMLESS, ids=str)
def test_served(fields, gpu):
    assert passes(**fields)


def test_defaults_without_a_gpu(monkeypatch):
    pretend_gpu(monkeypatch, there=False)
    expected = dict(attention_backend="torch_native", device="cpu", disable_overlap_schedule=True, page_size=1)
    assert requirements.defaults_for({}) == expected
    assert requirements.defaults_for({"device": "auto", "page_size": 1}) == {
        name: value for name, value in expected.items() if name != "page_size"
    }
    assert "attention_backend" not in requirements.defaults_for({"attention_backend": "torch_native"})


def test_defaults_with_a_gpu(monkeypatch):
    pretend_gpu(monkeypatch)
    assert requirements.defaults_for({}) == {"attention_backend": "triton"}
    assert requirements.defaults_for({"attention_backend": "flashinfer"}) == {}


@pytest.fixture
def sm120(monkeypatch):
    """A Blackwell workstation GPU, as PyTorch would report one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu_id=0: (12, gpu_id))


@pytest.mark.parametrize(
    "given", [{}, {"attention_backend": "flashinfer"}, {"decode_attention_backend": "fa3"}], ids=str
)
def test_triton_is_forced_on_sm120(given, sm120, caplog):
    """Whatever the flags say: FlashInfer compiles on first use, which fails there on CUDA older than 12.9."""
    assert passes(**given)
    with caplog.at_level("INFO"):
        chosen = requirements.defaults_for(given)
    assert chosen == {name: "triton" for name in (*ATTENTION_FLAGS, "speculative_draft_attention_backend")}
    forced = [record.message for record in caplog.records if "forced" in record.message]
    assert len(forced) == 1 and "SM120" in forced[0] and "CUDA 12.9" in forced[0]
    # Other refusals stand.
    assert "--pp-size" in refusal_of(**given, pp_size=2)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (10, 3)], ids=str)
def test_triton_is_not_forced_elsewhere(capability, sm120, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu_id=0: capability)
    assert requirements.defaults_for({"attention_backend": "flashinfer"}) == {}
    assert "fa3" in refusal_of(attention_backend="fa3")


def test_sm120_gives_targets_and_chains_the_tree_kernel(sm120, monkeypatch):
    monkeypatch.setattr(attention_registry, "ATTENTION_BACKENDS", {"triton": None})
    monkeypatch.setattr(TritonTreeMaskAttnBackend, "tree_for_chains", False)
    activation._use_triton_tree_mask()
    assert attention_registry.ATTENTION_BACKENDS["triton"] is TritonTreeMaskAttnBackend
    assert TritonTreeMaskAttnBackend.tree_for_chains


def test_rounds_stay_on_every_gpu_and_in_the_interpreter(gpu, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert requirements.device_round() is gpu
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert requirements.device_round()


@pytest.mark.parametrize("field", ATTENTION_FLAGS[1:])
def test_one_phases_backend_leaves_no_other_to_sglang(field, monkeypatch):
    """On a Hopper GPU SGLang would pick fa3 for the phase that is left open."""
    pretend_gpu(monkeypatch)
    assert requirements.defaults_for({field: "triton"}).get("attention_backend") in ("triton", "flashinfer")


def test_an_indexed_cpu_is_a_cpu(monkeypatch):
    pretend_gpu(monkeypatch, there=False)
    assert requirements.on_cpu({"device": "cpu:0"})


# --- The two checkpoints ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_models.make_target(tmp_path_factory.mktemp("models") / "target")


def start(target, drafter, **keywords):
    """The block size that a server resolves, or its refusal."""
    server_args = ServerArgs(
        model_path=str(target),
        speculative_algorithm="DDTREE",
        speculative_draft_model_path=str(drafter),
        **keywords,
    )
    return server_args._ddtree_config.block_size


def edit_config(folder, **changes):
    path = folder / "config.json"
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    return folder


def test_a_fitting_pair(target, tmp_path):
    assert start(target, tiny_models.make_drafter(tmp_path / "d", block_size=2)) == 2
    deepest = tiny_models.make_drafter(tmp_path / "e", layer_ids=(0, 3), block_size=16)
    assert start(target, deepest) == 16


def test_block_size_of_a_checkpoint_without_one_is_16(target, tmp_path):
    drafter = edit_config(tiny_models.make_drafter(tmp_path / "d"), block_size=None)
    assert start(target, drafter) == 16
    nested = {"mask_token_id": 300, "target_layer_ids": [0, 1, 2], "block_size": 5}
    drafter = edit_config(tiny_models.make_drafter(tmp_path / "nested"), dflash_config=nested)
    assert start(target, drafter) == 5


@pytest.mark.parametrize("architectures", [["Qwen3ForCausalLM"], None], ids=str)
def test_a_drafter_that_is_no_dflash_model(architectures, target, tmp_path):
    drafter = edit_config(tiny_models.make_drafter(tmp_path / "d"), architectures=architectures)
    with pytest.raises(FlagError) as error:
        start(target, drafter)
    message = str(error.value)
    assert f"--speculative-draft-model-path {drafter}" in message
    assert (str(architectures) if architectures else "no architecture") in message
    assert "Give a checkpoint whose config.json names DFlashDraftModel." in message


UNREADABLE = {"no folder": None, "empty": "", "broken": "{broken", "empty list": '{"architectures": []}'}


@pytest.fixture(params=UNREADABLE.values(), ids=UNREADABLE)
def unreadable(request, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    drafter = tmp_path / "nowhere"
    if request.param is not None:
        drafter.mkdir()
        (drafter / "config.json").write_text(request.param)
    return drafter


def assert_says_unreadable(error, drafter):
    message = str(error.value)
    assert f"--speculative-draft-model-path {drafter}" in message
    assert "Give a folder or a hub name of a DFlash checkpoint." in message


def test_an_unreadable_drafter(unreadable):
    with pytest.raises(FlagError) as error:
        check(model_config(Qwen3Config()), unreadable)
    assert_says_unreadable(error, unreadable)


def test_a_server_with_an_unreadable_drafter(unreadable, target):
    with pytest.raises(FlagError) as error:
        start(target, unreadable)
    assert_says_unreadable(error, unreadable)


def test_another_hidden_size(target, tmp_path):
    drafter = tiny_models.make_drafter(tmp_path / "d", hidden=32)
    with pytest.raises(FlagError) as error:
        start(target, drafter)
    message = str(error.value)
    assert f"--speculative-draft-model-path {drafter} has hidden_size 32" in message
    assert f"{target} has 64" in message and "Use the drafter that was trained for this target." in message


@pytest.mark.parametrize("ids", [(0, 4), (-1, 2), (99,)], ids=str)
def test_target_layers_that_do_not_exist(ids, target, tmp_path):
    drafter = tiny_models.make_drafter(tmp_path / "d", layer_ids=ids)
    with pytest.raises(FlagError) as error:
        start(target, drafter)
    message = str(error.value)
    assert f"--speculative-draft-model-path {drafter} reads target layers {list(ids)}" in message
    assert "has layers 0 to 3" in message and "Use the drafter that was trained for this target." in message


def test_more_candidates_than_tokens(target, tmp_path):
    drafter = tiny_models.make_drafter(tmp_path / "d")
    assert start(target, drafter, speculative_ddtree_topk_cap=320) == 8
    with pytest.raises(FlagError) as error:
        start(target, drafter, speculative_ddtree_topk_cap=321)
    assert str(error.value) == f"{CAP} must be at most the vocabulary's 320 tokens, got 321."


def test_a_block_without_a_draft(target, tmp_path):
    drafter = tiny_models.make_drafter(tmp_path / "d", block_size=1)
    with pytest.raises(FlagError) as error:
        start(target, drafter)
    message = str(error.value)
    assert f"--speculative-draft-model-path {drafter} has block_size 1" in message
    assert "at least one draft" in message
    # The flag overrides the checkpoint.
    assert start(target, drafter, speculative_dflash_block_size=4) == 4


# --- Hybrid and windowed targets --------------------------------------------------------------------


def granite(layer_type):
    config = configs.GraniteMoeHybridConfig()
    config.layer_types = [layer_type] * 4
    return config


ATTENTION_ONLY = {
    "Qwen3": Qwen3Config,
    "Llama": LlamaConfig,
    "Granite without Mamba": lambda: granite("attention"),
}
GDN = "gated delta rule (GDN)"
# Exact in a tree, by SGLang's own kernels.
PROVEN = {
    "Qwen3-Next": (configs.Qwen3NextConfig, GDN),
    "Qwen3.5": (configs.Qwen3_5Config, GDN),
    "Qwen3.5 MoE": (configs.Qwen3_5MoeConfig, GDN),
    "Nemotron-H": (configs.NemotronHConfig, "Mamba2"),
    "Granite with Mamba": (lambda: granite("mamba"), "Mamba2"),
}
UNPROVEN = {
    "Jet-Nemotron": (configs.JetNemotronConfig, f"{GDN} with a dynamic convolution"),
    "Falcon-H1": (configs.FalconH1Config, "Mamba2"),
    "LFM2": (configs.Lfm2Config, "short convolution"),
    "LFM2 MoE": (configs.Lfm2MoeConfig, "short convolution"),
    "Inkling": (configs.InklingModelConfig, "short convolution"),
    "Kimi Linear": (configs.KimiLinearConfig, "Kimi delta attention (KDA)"),
    "Bailing": (configs.BailingHybridConfig, "Lightning attention"),
}
# Settings under which they are not: of which kind, the setting, and what the message must name.
UNPROVEN_SETTINGS = {
    "FlashInfer for Mamba2": ("Nemotron-H", dict(mamba_backend="flashinfer"), "--mamba-backend flashinfer"),
    "stochastic rounding": (
        "Nemotron-H",
        dict(enable_mamba_cache_stochastic_rounding=True),
        "--enable-mamba-cache-stochastic-rounding",
    ),
    "int8 checkpoints": ("Qwen3.5", dict(enable_int8_mamba_checkpoint=True), "--enable-int8-mamba-checkpoint"),
    "a short interval": (
        "Qwen3.5",
        dict(mamba_radix_cache_strategy="extra_buffer", mamba_track_interval=15),
        "--mamba-track-interval 15 is shorter than two rounds (give 16 or more)",
    ),
}
PROVEN_SETTINGS = {
    "as it comes": {},
    "two rounds": dict(mamba_radix_cache_strategy="extra_buffer", mamba_track_interval=16),
    "no tracking": dict(mamba_radix_cache_strategy="no_buffer", mamba_track_interval=1),
    "no prefix cache": dict(
        disable_radix_cache=True, mamba_radix_cache_strategy="extra_buffer", mamba_track_interval=1
    ),
    # Whatever decodes or reads prompts, GDN verifies a tree by one kernel.
    "other GDN kernels": dict(linear_attn_backend="flashinfer", linear_attn_prefill_backend="cutedsl"),
}


def model_config(hf_config, **fields):
    """The part of SGLang's ModelConfig that is read, around one of its real checkpoint configs."""
    defaults = dict(
        hf_config=hf_config,
        hf_text_config=SimpleNamespace(hidden_size=tiny_models.HIDDEN, num_hidden_layers=4),
        vocab_size=tiny_models.VOCABULARY,
        is_draft_model=False,
        linear_attn_registry_result=None,
        is_hybrid_swa=False,
        attention_chunk_size=None,
    )
    return SimpleNamespace(**(defaults | fields))


@pytest.fixture(scope="module")
def drafter(tmp_path_factory):
    return tiny_models.make_drafter(tmp_path_factory.mktemp("models") / "drafter", block_size=8)


def check(target_config, drafter, settings=None, **flags):
    """Budget 15 and blocks of 8: a round commits up to 8 tokens."""
    server_args = SimpleNamespace(
        **{"device": "cuda", **(settings or {})},
        model_path="org/target",
        get_model_config=lambda: target_config,
        speculative_draft_model_path=str(drafter),
        speculative_draft_model_revision=None,
        speculative_dflash_block_size=None,
        trust_remote_code=False,
        json_model_override_args="{}",
    )
    return requirements.check_models(server_args, DDTreeConfig(**flags))


def assert_refused_with_both_ways_out(target_config, drafter, kind, caplog, settings=None):
    with pytest.raises(FlagError) as error:
        check(target_config, drafter, settings)
    message = str(error.value)
    assert f"org/target has recurrent layers of type {kind}, whose state" in message
    assert f"{SHADOW} serves DFLASH's chain" in message and f"{UNSAFE} runs the tree anyway" in message
    assert check(target_config, drafter, settings, shadow_linear=True) == 8
    assert caplog.records == []
    assert check(target_config, drafter, settings, allow_hybrid_unsafe=True) == 8
    (warning,) = caplog.records
    assert kind in warning.getMessage() and UNSAFE in warning.getMessage()
    return message


def describe(target_config, settings=None, **flags):
    config = DDTreeConfig(block_size=8, **flags)
    return requirements.describe(config, SimpleNamespace(**(settings or {})), target_config)


@pytest.mark.parametrize("make", ATTENTION_ONLY.values(), ids=ATTENTION_ONLY)
def test_attention_only_targets_are_served(make, drafter):
    assert hybrid.recurrent_layers(model_config(make())) is None
    assert check(model_config(make()), drafter) == 8
    assert describe(model_config(make()), allow_hybrid_unsafe=True)["exact"] is True


@pytest.mark.parametrize("settings", PROVEN_SETTINGS.values(), ids=PROVEN_SETTINGS)
@pytest.mark.parametrize("make, kind", PROVEN.values(), ids=PROVEN)
def test_exact_hybrids_are_served_without_a_flag(make, kind, settings, drafter, caplog):
    assert hybrid.recurrent_layers(model_config(make())).name == kind
    for flags in ({}, dict(allow_hybrid_unsafe=True), dict(shadow_linear=True)):
        assert check(model_config(make()), drafter, settings, **flags) == 8
        assert describe(model_config(make()), settings, **flags)["exact"] is True
    assert caplog.records == []


@pytest.mark.parametrize("make, kind", UNPROVEN.values(), ids=UNPROVEN)
def test_other_hybrids_are_refused_with_both_ways_out(make, kind, drafter, caplog):
    assert_refused_with_both_ways_out(model_config(make()), drafter, kind, caplog)
    assert describe(model_config(make()), allow_hybrid_unsafe=True)["exact"] is False
    assert describe(model_config(make()), allow_hybrid_unsafe=True, shadow_linear=True)["exact"] is True


@pytest.mark.parametrize("name, settings, named", UNPROVEN_SETTINGS.values(), ids=UNPROVEN_SETTINGS)
def test_settings_that_make_a_hybrid_inexact(name, settings, named, drafter, caplog):
    make, kind = PROVEN[name]
    assert named in assert_refused_with_both_ways_out(model_config(make()), drafter, kind, caplog, settings)
    assert describe(model_config(make()), settings, allow_hybrid_unsafe=True)["exact"] is False


def test_convolution_states_of_another_type(drafter, caplog, monkeypatch):
    """Rounded when kept and not within a round: the same token would be read in two ways."""
    target_config = model_config(configs.Qwen3_5Config(), dtype=torch.float16)
    message = assert_refused_with_both_ways_out(target_config, drafter, GDN, caplog)
    assert "set SGLANG_MAMBA_CONV_DTYPE=float16" in message
    assert check(model_config(configs.Qwen3_5Config(), dtype=torch.bfloat16), drafter) == 8
    monkeypatch.setenv("SGLANG_MAMBA_CONV_DTYPE", "float16")
    assert check(target_config, drafter) == 8


def test_no_hybrid_runs_on_a_cpu(drafter):
    for flags in ({}, dict(allow_hybrid_unsafe=True), dict(shadow_linear=True)):
        with pytest.raises(FlagError, match=r"type gated delta rule \(GDN\), and SGLang keeps the states .* on a GPU"):
            check(model_config(configs.Qwen3_5Config()), drafter, dict(device="cpu"), **flags)


def test_a_recurrent_kind_that_only_sglangs_registry_knows(drafter):
    target_config = model_config(Qwen3Config(), linear_attn_registry_result=("spec", "config"))
    with pytest.raises(FlagError, match="recurrent layers of type recurrent"):
        check(target_config, drafter)


@pytest.mark.parametrize("fields", [dict(is_hybrid_swa=True), dict(attention_chunk_size=8192)], ids=str)
def test_windowed_targets_are_refused(fields, drafter):
    target_config = model_config(Qwen3Config(), **fields)
    for flags in ({}, dict(allow_hybrid_unsafe=True)):
        with pytest.raises(FlagError) as error:
            check(target_config, drafter, **flags)
        message = str(error.value)
        assert "org/target uses sliding-window attention" in message
        assert f"Serve the chain with {SHADOW}, or drop DDTREE." in message
    assert check(target_config, drafter, shadow_linear=True) == 8


def test_a_checkpoint_that_brings_a_quantised_kv_cache():
    server_args = SimpleNamespace(model_path="org/target")
    runner = SimpleNamespace(sliding_window_size=None, kv_cache_dtype=torch.float8_e4m3fn)
    with pytest.raises(FlagError, match="org/target brings a quantised KV cache.*Give --kv-cache-dtype bfloat16"):
        requirements.check_loaded_target(server_args, runner, DDTreeConfig())


def test_multi_head_latent_attention_is_refused(drafter):
    from sglang.srt.configs.model_config import AttentionArch

    target_config = model_config(Qwen3Config(), attention_arch=AttentionArch.MLA)
    with pytest.raises(FlagError, match=f"org/target uses multi-head latent attention.*{SHADOW}"):
        check(target_config, drafter)
    assert check(target_config, drafter, shadow_linear=True) == 8


@pytest.mark.parametrize("window, windowed", [(None, False), (-1, False), (0, False), (1, True), (4095, True)])
def test_a_window_that_shows_once_the_target_is_loaded(window, windowed):
    server_args = SimpleNamespace(model_path="org/target")
    runner = SimpleNamespace(sliding_window_size=window, kv_cache_dtype=torch.bfloat16)
    requirements.check_loaded_target(server_args, runner, DDTreeConfig(shadow_linear=True))
    if windowed:
        with pytest.raises(FlagError, match=f"org/target uses sliding-window attention.*{SHADOW}"):
            requirements.check_loaded_target(server_args, runner, DDTreeConfig())
    else:
        requirements.check_loaded_target(server_args, runner, DDTreeConfig())


# --- A budget that follows the load ------------------------------------------------------------------

AUTO = DDTreeConfig(budget=63, auto=True)
BY_DEFAULT = dataclasses.replace(AUTO, auto_by_default=True, most_given=False)
FLASHINFER = "cannot verify trees of different sizes in one batch. Use --attention-backend triton, or give a number"


@pytest.mark.parametrize(
    "fields, named",
    [
        ({"attention_backend": "triton"}, None),
        ({"attention_backend": "flashinfer"}, "--attention-backend flashinfer"),
        ({"attention_backend": "triton", "decode_attention_backend": "flashinfer"}, "--decode-attention-backend"),
        ({"attention_backend": "triton", "prefill_attention_backend": "flashinfer"}, "--prefill-attention-backend"),
        # Neither phase is left to it; and the drafter's rounds are of one width whatever the trees are.
        (dict.fromkeys(requirements._PHASE_BACKENDS, "triton") | {"attention_backend": "flashinfer"}, None),
        ({"attention_backend": "triton", "speculative_draft_attention_backend": "flashinfer"}, None),
    ],
    ids=str,
)
def test_auto_needs_a_backend_that_packs(fields, named, monkeypatch):
    pretend_gpu(monkeypatch)
    number, by_default = DDTreeConfig(), dataclasses.replace(AUTO, auto_by_default=True)
    assert requirements.settle_auto_by_fields(number, fields) is number
    if named is None:
        assert requirements.settle_auto_by_fields(AUTO, fields) is AUTO
        return
    with pytest.raises(FlagError, match=f"budget auto here: {named}.*{FLASHINFER}"):
        requirements.settle_auto_by_fields(AUTO, fields)
    # Where it was only the default, a number is served instead.
    assert requirements.settle_auto_by_fields(by_default, fields) == number


@pytest.mark.parametrize("field", ["disable_cuda_graph_padding", "enable_two_batch_overlap", "enable_torch_compile"])
def test_auto_needs_graphs_that_hold_any_batch(field, monkeypatch):
    pretend_gpu(monkeypatch)
    fields = {"attention_backend": "triton", field: True}
    flag = f"--{field.replace('_', '-')}"
    with pytest.raises(FlagError, match=f"budget auto here: {flag}.*Drop {flag}, or give a number"):
        requirements.settle_auto_by_fields(AUTO, fields)
    by_default = dataclasses.replace(AUTO, auto_by_default=True)
    assert requirements.settle_auto_by_fields(by_default, fields) == DDTreeConfig()


@pytest.mark.parametrize(
    "fields, reason",
    [
        ({"device": "cpu", "attention_backend": "torch_native"}, "rounds on a CPU"),
        ({"debug_tensor_dump_output_folder": "x"}, "--debug-tensor-dump-output-folder: rounds without graphs"),
        ({"msprobe_dump_config": "x"}, "--msprobe-dump-config: rounds without graphs"),
        ({}, None),
    ],
    ids=str,
)
def test_auto_is_no_default_where_rounds_have_no_times(fields, reason, monkeypatch, caplog):
    pretend_gpu(monkeypatch)
    fields = {"attention_backend": "triton"} | fields
    # Asked for, it is served, with as many nodes for every request.
    assert requirements.settle_auto_by_fields(AUTO, fields) is AUTO
    with caplog.at_level("INFO"):
        settled = requirements.settle_auto_by_fields(BY_DEFAULT, fields)
    if reason is None:
        assert settled is BY_DEFAULT and not caplog.records
        return
    assert settled == DDTreeConfig()
    assert f"budget 15 instead of auto: {reason} have no times to decide by." in caplog.text


def test_auto_is_no_default_with_a_forced_acceptance(monkeypatch):
    pretend_gpu(monkeypatch)
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "3.5")
    assert requirements.settle_auto_by_fields(BY_DEFAULT, {"attention_backend": "triton"}) == DDTreeConfig()
    assert requirements.settle_auto_by_fields(AUTO, {"attention_backend": "triton"}) is AUTO


@pytest.mark.parametrize("backend, timed", [("full", True), ("disabled", False)])
def test_auto_is_no_default_without_decode_graphs(backend, timed):
    """Whatever switched them off: SGLang has decided by then."""
    server_args = SimpleNamespace(cuda_graph_config=SimpleNamespace(decode=SimpleNamespace(backend=backend)))
    settled = requirements.settle_auto_by_graphs(BY_DEFAULT, server_args)
    assert settled is BY_DEFAULT if timed else settled == DDTreeConfig()
    assert requirements.settle_auto_by_graphs(AUTO, server_args) is AUTO
    assert requirements.settle_auto_by_graphs(DDTreeConfig(), server_args) == DDTreeConfig()


@pytest.mark.parametrize(
    "field, value",
    [("moe_a2a_backend", "deepep"), ("attn_cp_size", 2), ("enable_dp_attention", True), ("moe_dense_tp_size", 1)],
)
def test_what_sglang_makes_of_the_arguments_is_refused_as_well(field, value):
    """Its own decisions are beside the arguments until all of them have been made."""
    given = dict(moe_a2a_backend="none", attn_cp_size=1, enable_dp_attention=False, moe_dense_tp_size=None)
    given |= dict(enable_prefill_cp=False)
    requirements.check_resolved(SimpleNamespace(**given, _resolved_overrides=[]))
    decided = SimpleNamespace(**given, _resolved_overrides=[("SGLang", {field: value})])
    with pytest.raises(FlagError, match=f"--{field.replace('_', '-')}"):
        requirements.check_resolved(decided)


def settle(config, target):
    return requirements.settle_auto_by_target(config, SimpleNamespace(model_path="org/target"), model_config(target))


@pytest.mark.parametrize("target", [configs.Qwen3_5Config, configs.Qwen3NextConfig])
def test_auto_is_uniform_with_gdn_layers(target):
    number = DDTreeConfig()
    assert settle(AUTO, Qwen3Config()) is AUTO and AUTO.packed
    assert settle(number, target()) is number
    # What was asked for stays; a default is less, since every node of every request has states.
    asked = settle(AUTO, target())
    assert (asked.uniform, asked.budget, asked.packed) == (True, 63, False)
    assert settle(dataclasses.replace(AUTO, most_given=False), target()).budget == 15
    # By itself it is not chosen there.
    assert settle(BY_DEFAULT, target()) == number


@pytest.mark.parametrize("kind", [hybrid.MAMBA2, hybrid.SEQUENTIAL_MAMBA2, hybrid.DYNAMIC_GDN, hybrid.KDA], ids=str)
def test_auto_needs_states_that_the_commit_finds_at_any_width(kind, monkeypatch):
    """Mamba2's kernel lays a narrow round's states out where the commit does not look; of others nothing is known."""
    monkeypatch.setattr(hybrid, "recurrent_layers", lambda target: kind)
    unsafe, target = dataclasses.replace(AUTO, allow_hybrid_unsafe=True), Qwen3Config
    with pytest.raises(FlagError, match="budget auto here: the target org/target has recurrent layers of type"):
        settle(unsafe, target())
    number = DDTreeConfig(allow_hybrid_unsafe=True)
    assert settle(dataclasses.replace(unsafe, auto_by_default=True), target()) == number


def test_what_a_server_says_of_auto():
    described = describe(model_config(Qwen3Config()), budget=31, auto=True)
    assert (described["budget"], described["max_budget"], described["verify_width"]) == ("auto", 31, 32)
    fixed = describe(model_config(Qwen3Config()), budget=31)
    assert fixed["budget"] == 31 and set(fixed) == set(described) - {"max_budget"}
    assert not {"auto", "auto_by_default", "uniform", "most_given"} & set(described)
