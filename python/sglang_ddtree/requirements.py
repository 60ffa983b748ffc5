"""What DDTREE can be started with: defaults it fills in, and every combination it refuses.

Two stages: :func:`check_fields` looks at the arguments as given, before SGLang resolves them, so that the
first error names what the user typed; :func:`check_models` looks at the two checkpoints.
"""

import dataclasses
import logging
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from sglang_ddtree import cpu, hybrid
from sglang_ddtree.flags import AUTO, HYBRID_AUTO_BUDGET, DDTreeConfig, FlagError, flag_name, settle_auto

logger = logging.getLogger(__name__)

GPU_BACKENDS = ("triton", "flashinfer")
CPU_BACKENDS = ("torch_native",)
# Of these, the ones that verify trees of different sizes in one batch without padding.
PACKED_BACKENDS = ("triton", "torch_native")


def has_gpu() -> bool:
    """Whether there is an NVIDIA GPU; ROCm answers to the same name in PyTorch."""
    import torch

    return torch.cuda.is_available() and torch.version.hip is None


def is_sm120(gpu_id: int = 0) -> bool:
    """Whether this is a Blackwell workstation GPU (compute capability 12.x)."""
    import torch

    return has_gpu() and torch.cuda.get_device_capability(gpu_id)[0] == 12


def device_round() -> bool:
    """Whether Triton runs: kernels between the forwards, and ancestor-mask attention as the backend ``triton``.

    On every GPU; without one only under Triton's interpreter (TRITON_INTERPRET=1), for tests.
    """
    return has_gpu() or os.environ.get("TRITON_INTERPRET") == "1"


def on_cpu(fields: dict[str, Any]) -> bool:
    """Whether the server will run on the CPU: asked for, or nothing else is there."""
    device = _device_type(fields)
    return device == "cpu" or (device == "auto" and not has_gpu() and not cpu.has_accelerator())


def can_overlap(fields: dict[str, Any]) -> bool:
    """Whether scheduling may overlap with a round: on a CPU not even SGLang's own speculative algorithms do."""
    return not on_cpu(fields)


def _device_type(fields: dict[str, Any]) -> str:
    """ "cuda" of "cuda:1"; "auto" where nothing was asked for."""
    return str(fields.get("device") or "auto").split(":")[0]


def backends_for(fields: dict[str, Any]) -> tuple[str, ...]:
    return CPU_BACKENDS if on_cpu(fields) else GPU_BACKENDS


def defaults_for(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields that SGLang would resolve to something DDTREE cannot use, set beforehand."""
    chosen: dict[str, Any] = {}
    if _forces_triton(fields):
        logger.info(
            "DDTREE: --attention-backend triton is forced on this GPU (SM120): FlashInfer's JIT needs CUDA 12.9 or "
            "newer there."
        )
        chosen.update({name: "triton" for name in _BACKEND_FLAGS})
        return chosen
    # What SGLang would pick for a phase that is left open may not know trees.
    if fields.get("attention_backend") is None and any(fields.get(name) is None for name in _PHASE_BACKENDS):
        chosen["attention_backend"] = backends_for(fields)[0]
        logger.info("DDTREE: --attention-backend not given, using %s", chosen["attention_backend"])
    if on_cpu(fields):
        chosen["device"] = "cpu"
        if not can_overlap(fields):
            chosen["disable_overlap_schedule"] = True
        if fields.get("page_size") is None:
            chosen["page_size"] = 1
    return chosen


def _forces_triton(fields: dict[str, Any]) -> bool:
    return not on_cpu(fields) and is_sm120(int(fields.get("base_gpu_id") or 0))


_NO_GRAPHS = "rounds without graphs have no times to decide by"
_PADS = "SGLang pads the batches of its ranks there, which has not been tried with trees"

# Flags that are refused whatever their value is, when it is set: field, reason, remedy.
_NEVER = (
    (
        "enable_dp_attention",
        "idle ranks have no tree to verify",
        "Use --tp-size, or several servers",
    ),
    ("enable_lora", "the drafter knows only the base target", "Drop LoRA or DDTREE"),
    ("lora_paths", "the drafter knows only the base target", "Drop LoRA or DDTREE"),
    (
        "speculative_draft_window_size",
        "the compact draft cache is not implemented for trees",
        "Drop the flag",
    ),
    ("speculative_adaptive", "the tree's size follows from its own flags", "Drop the flag"),
    (
        "enable_return_routed_experts",
        "a tree moves KV slots, and the routing recorded for a slot would stay behind",
        "Drop the flag",
    ),
    (
        "enable_return_indexer_topk",
        "a tree moves KV slots, and the indices recorded for a slot would stay behind",
        "Drop the flag",
    ),
    ("enable_linear_replayssm", "its buffer is filled by decoding one token at a time", "Drop the flag"),
    ("enable_linear_replayssm_spec", "its kernel replays a chain", "Drop the flag"),
    ("enable_page_major_kv_layout", "a tree's commit writes contiguous pools", "Drop the flag"),
    (
        "enable_memory_saver",
        "SGLang keeps no copy of the drafter's buffers while memory is released",
        "Drop the flag",
    ),
    *(
        (name, "the target's numbers depend on how many nodes and requests are verified together", "Drop the flag")
        for name in ("enable_deterministic_inference", "rl_on_policy_target")
    ),
    ("enable_pdmux", "its prefill brings no features for the drafter", "Drop the flag"),
    *(
        (name, "no rank has the drafter's features of a whole prompt", "Use --tp-size")
        for name in (
            "enable_prefill_cp",
            "enable_prefill_context_parallel",
            "enable_dsa_prefill_context_parallel",
        )
    ),
    ("moe_dense_tp_size", _PADS, "Drop the flag"),
    *(
        (
            name,
            "the tree's size follows from its own flags",
            f"Use {flag_name('budget')} and {flag_name('topk_cap')}",
        )
        for name in ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
    ),
)

# Flags with one value that is served: field, that value, reason, remedy.
_ONLY = (
    ("pp_size", 1, "drafting needs every target layer on one rank", "Use --tp-size"),
    ("dcp_size", 1, "SGLang's tree masks know no context parallelism", "Use --tp-size"),
    ("attn_cp_size", 1, "no rank has the drafter's features of a whole prompt", "Use --tp-size"),
    ("moe_a2a_backend", "none", _PADS, "Use none, with --ep-size if experts are to be dealt out"),
    ("kv_canary", "none", "a tree moves KV slots, which it takes for damage", "Use none"),
    (
        "disaggregation_mode",
        "null",
        "the drafter's KV cache is not transferred between servers",
        "Serve prefill and decode from one server",
    ),
    (
        "tokenizer_worker_num",
        1,
        "SGLang loads no plugins in the extra HTTP workers",
        "Use --tokenizer-worker-num 1",
    ),
)

# Of both, what SGLang may set by itself.
_RESOLVED = ("enable_dp_attention", "enable_prefill_cp", "moe_dense_tp_size", "attn_cp_size", "moe_a2a_backend")

_KV_CACHE_DTYPES = ("auto", "bfloat16", "bf16", "float16", "float32")
_PHASE_BACKENDS = ("prefill_attention_backend", "decode_attention_backend")
_BACKEND_FLAGS = ("attention_backend", *_PHASE_BACKENDS, "speculative_draft_attention_backend")


def _refuse(field: str, got: Any, reason: str, remedy: str) -> None:
    flag = "--" + field.replace("_", "-") if field.islower() else field
    value = "" if got is True else f" {got}"
    raise FlagError(f"DDTREE does not support {flag}{value}: {reason}. {remedy}.")


def _check_listed(get: Callable[[str], Any]) -> None:
    """Refuse by `_NEVER` and `_ONLY`; ``get`` gives a field's value, None if nothing is to be said of it."""
    for field, reason, remedy in _NEVER:
        value = get(field)
        # A zero was given, and is refused too.
        if value is not None and value is not False and value != []:
            _refuse(field, value, reason, remedy)
    for field, served, reason, remedy in _ONLY:
        if get(field) is not None and get(field) != served:
            _refuse(field, get(field), reason, remedy)


def _simulates() -> bool:
    """Whether SGLang is told to force how many tokens a round commits."""
    return float(os.environ.get("SGLANG_SIMULATE_ACC_LEN") or 0) > 0


def check_fields(fields: dict[str, Any]) -> None:
    """Refuse what no model could make work.

    Args:
        fields: constructor arguments of ``ServerArgs`` as the user gave them, by field name.
    Raises:
        FlagError: names the flag, its value and the remedy.
    """
    get = fields.get
    if not get("speculative_draft_model_path"):
        raise FlagError(
            "DDTREE needs --speculative-draft-model-path, got none. Give the path or name of a DFlash "
            "drafter for this target, e.g. z-lab/Qwen3-8B-DFlash-b16 for Qwen/Qwen3-8B."
        )
    _check_device(fields)
    _check_listed(get)
    allowed = backends_for(fields)
    for field in () if _forces_triton(fields) else _BACKEND_FLAGS:
        if get(field) is not None and get(field) not in allowed:
            _refuse(
                field,
                get(field),
                "only backends that apply a tree's ancestor mask can verify it"
                + (" (this server runs on the CPU)" if on_cpu(fields) else ""),
                f"Use --attention-backend {' or '.join(allowed)}",
            )
    if str(get("kv_cache_dtype") or "auto") not in _KV_CACHE_DTYPES:
        _refuse(
            "kv_cache_dtype",
            get("kv_cache_dtype"),
            "tree verify with a quantised KV cache has not been proven exact",
            "Use --kv-cache-dtype auto",
        )
    simulated_tokens = os.environ.get("SGLANG_SIMULATE_ACC_TOKEN_MODE") or "fixed"
    if _simulates() and simulated_tokens != "fixed":
        _refuse(
            "SGLANG_SIMULATE_ACC_TOKEN_MODE",
            simulated_tokens,
            "a tree has no single draft token per position",
            "Use fixed, or unset SGLANG_SIMULATE_ACC_LEN",
        )
    if get("speculative_dflash_block_size") is not None and int(fields["speculative_dflash_block_size"]) < 2:
        _refuse(
            "speculative_dflash_block_size",
            get("speculative_dflash_block_size"),
            "a block holds the last token and at least one draft",
            "Use 2 or more, or drop the flag to read it from the drafter",
        )


def check_resolved(server_args: Any) -> None:
    """Refuse what SGLang itself makes of the arguments, by environment variables, the target and older flags.

    Args:
        server_args: in the middle of their resolution, as an algorithm sees them.

    Raises:
        FlagError: as `check_fields`.
    """
    from sglang.srt.arg_groups.overrides import resolved_view

    resolved = resolved_view(server_args)
    _check_listed(lambda field: getattr(resolved, field, None) if field in _RESOLVED else None)


def settle_auto_by_fields(config: DDTreeConfig, fields: dict[str, Any]) -> DDTreeConfig:
    """The config as far as the arguments let the budget follow the load.

    Where rounds have no times auto gives every request as many nodes, so that as a default it is a number there.

    Args:
        config: as the flags say.
        fields: constructor arguments of ``ServerArgs``, those of `defaults_for` included.

    Raises:
        FlagError: auto was asked for, and an attention backend of the target knows no packed rounds, or the graphs of
            packed rounds cannot be had.
    """
    if config.auto_by_default and (untimed := _untimed(fields)):
        config = settle_auto(config, untimed, "Ask for it")
    for field, value in (
        ("disable_cuda_graph_padding", "its graphs hold any requests that fit"),
        ("enable_two_batch_overlap", "its graphs do not split a batch in two"),
        ("enable_torch_compile", "SGLang compiles graphs by their requests, and these have tokens"),
    ):
        if fields.get(field):
            flag = f"--{field.replace('_', '-')}"
            config = settle_auto(config, f"{flag}: {value}", f"Drop {flag}")
    for phase in _PHASE_BACKENDS:
        field = phase if fields.get(phase) is not None else "attention_backend"
        if fields.get(field) not in PACKED_BACKENDS:
            served = [backend for backend in backends_for(fields) if backend in PACKED_BACKENDS]
            config = settle_auto(
                config,
                f"--{field.replace('_', '-')} {fields.get(field)} cannot verify trees of different sizes in one batch",
                f"Use --attention-backend {' or '.join(served)}",
            )
    return config


def _untimed(fields: dict[str, Any]) -> str | None:
    """Why rounds will have no times, as far as the arguments tell."""
    if on_cpu(fields):
        return "rounds on a CPU have no times to decide by"
    for field in ("debug_tensor_dump_output_folder", "msprobe_dump_config"):
        # SGLang switches the graphs off for these once the algorithm has been asked.
        if fields.get(field):
            return f"--{field.replace('_', '-')}: {_NO_GRAPHS}"
    if _simulates():
        return "rounds of SGLANG_SIMULATE_ACC_LEN have no times to decide by"
    return None


def settle_auto_by_graphs(config: DDTreeConfig, server_args: Any) -> DDTreeConfig:
    """The config where SGLang captures no graphs for decoding, whatever the reason: auto is no default there."""
    decode = getattr(server_args.cuda_graph_config, "decode", None)
    if config.auto_by_default and (decode is None or decode.backend == "disabled"):
        return settle_auto(config, f"CUDA graphs for decoding are disabled: {_NO_GRAPHS}", "Ask for it")
    return config


def settle_auto_by_target(config: DDTreeConfig, server_args: Any, target: Any) -> DDTreeConfig:
    """The config as far as the target lets the budget follow the load; ``target`` is SGLang's ``ModelConfig``.

    On a target with recurrent layers the rounds are uniform, and auto has to be asked for.

    Raises:
        FlagError: auto was asked for, and the target has recurrent layers other than GDN.
    """
    kind = hybrid.recurrent_layers(target) if config.auto else None
    if kind is None:
        return config
    layers = f"the target {server_args.model_path} has recurrent layers of type {kind.name}"
    if kind is not hybrid.GDN:
        # Mamba2's kernel lays a round's states out by the round's nodes, SGLang's commit by the pool's.
        return settle_auto(
            config,
            f"{layers}, which were not shown to follow trees of changing size",
            "Serve a target of attention alone, or with GDN layers",
        )
    if config.auto_by_default:
        return settle_auto(config, f"{layers}, where every size of tree takes memory of its own", "Ask for it")
    budget = config.budget if config.most_given else min(config.budget, HYBRID_AUTO_BUDGET)
    return dataclasses.replace(config, uniform=True, budget=budget)


def _check_device(fields: dict[str, Any]) -> None:
    """Refuse devices other than an NVIDIA GPU, or the CPU of a machine without one."""
    device, given = _device_type(fields), fields.get("device") or "auto"
    if device == "cpu" and has_gpu():
        _refuse(
            "device",
            given,
            "the stand-ins for SGLang's CPU kernels are used only where there is no GPU",
            "Hide the GPU (CUDA_VISIBLE_DEVICES=) or drop the flag",
        )
    if device not in ("cuda", "cpu", "auto") or not (on_cpu(fields) or has_gpu()):
        _refuse("device", given, "it runs on NVIDIA GPUs, and on the CPU of a machine without a GPU", "Use cuda or cpu")
    if on_cpu(fields) and int(fields.get("page_size") or 1) != 1:
        _refuse("page_size", fields["page_size"], "SGLang's paged allocator needs a GPU", "Use --page-size 1")


def describe(config: DDTreeConfig, server_args: Any, target: Any) -> dict[str, Any]:
    """What ``/server_info`` shows of a DDTREE server; ``target`` is SGLang's ``ModelConfig``.

    ``exact`` is False only where an unsafe flag lets a tree run over recurrent layers that are not proven exact.
    """
    checked = config.shadow_linear or not config.allow_hybrid_unsafe
    exact = checked or hybrid.unproven(server_args, target, config) is None
    derived = {"verify_width": config.verify_width, "max_depth": config.max_depth, "exact": exact}
    shown: dict[str, Any] = dataclasses.asdict(config)
    for name in ("auto", "auto_by_default", "uniform", "most_given"):
        del shown[name]
    if config.auto:
        shown |= {"budget": AUTO, "max_budget": config.budget}
    return {**shown, **derived}


def load_draft_config(server_args: Any) -> Any:
    """The drafter's Hugging Face config.

    Raises:
        FlagError: the path or the config cannot be read.
    """
    import json

    from sglang.srt.utils.hf_transformers_utils import get_config

    path = server_args.speculative_draft_model_path
    try:
        return get_config(
            path,
            trust_remote_code=server_args.trust_remote_code,
            revision=server_args.speculative_draft_model_revision,
            model_override_args=json.loads(server_args.json_model_override_args),
        )
    except Exception as error:
        raise FlagError(
            f"DDTREE cannot read the drafter's config from --speculative-draft-model-path {path}: "
            f"{type(error).__name__}: {error}. Give a folder or a hub name of a DFlash checkpoint."
        ) from error


def check_drafter_readable(fields: dict[str, Any]) -> None:
    """Read the drafter's config before SGLang does, whose error would not name the flag.

    Raises:
        FlagError: the path or the config cannot be read.
    """
    if os.environ.get("SGLANG_USE_MODELSCOPE", "").lower() in ("1", "true"):
        return  # SGLang has yet to turn the name into a local path
    load_draft_config(
        SimpleNamespace(
            speculative_draft_model_path=fields["speculative_draft_model_path"],
            speculative_draft_model_revision=fields.get("speculative_draft_model_revision"),
            trust_remote_code=bool(fields.get("trust_remote_code")),
            json_model_override_args=fields.get("json_model_override_args") or "{}",
        )
    )


def check_models(server_args: Any, config: DDTreeConfig) -> int:
    """Check that target and drafter fit each other and the flags.

    Returns:
        The drafter's block size D, inferred as DFLASH does: the flag, the checkpoint, else 16.
    Raises:
        FlagError: names flag, value and remedy.
    """
    from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config

    path = server_args.speculative_draft_model_path
    where = f"--speculative-draft-model-path {path}"
    draft = load_draft_config(server_args)
    names = list(getattr(draft, "architectures", None) or [])
    if not any("dflash" in name.lower() for name in names):
        raise FlagError(
            f"DDTREE needs a DFlash drafter, but {where} holds {names or 'no architecture'}. "
            "Give a checkpoint whose config.json names DFlashDraftModel."
        )
    parsed = parse_dflash_draft_config(draft_hf_config=draft)
    target = server_args.get_model_config()
    text = target.hf_text_config
    if int(draft.hidden_size) != int(text.hidden_size):
        raise FlagError(
            f"{where} has hidden_size {draft.hidden_size}, the target {server_args.model_path} has "
            f"{text.hidden_size}. Use the drafter that was trained for this target."
        )
    layers = int(text.num_hidden_layers)
    ids = parsed.target_layer_ids
    if ids is not None and not all(0 <= int(i) < layers for i in ids):
        raise FlagError(
            f"{where} reads target layers {list(ids)}, but the target {server_args.model_path} has layers 0 to "
            f"{layers - 1}. Use the drafter that was trained for this target."
        )
    if config.topk_cap > target.vocab_size:
        raise FlagError(
            f"{flag_name('topk_cap')} must be at most the vocabulary's {target.vocab_size} tokens, "
            f"got {config.topk_cap}."
        )
    asked = server_args.speculative_dflash_block_size
    block_size = int(asked) if asked is not None else parsed.resolve_block_size(default=16)
    if block_size is None or int(block_size) < 2:
        raise FlagError(
            f"{where} has block_size {block_size}: a block holds the last token and at least one draft. Use a drafter "
            "with a larger block."
        )
    _check_hybrid_device(server_args, target)
    if not config.shadow_linear:
        _check_tree_target(server_args, target, dataclasses.replace(config, block_size=int(block_size)))
    return int(block_size)


def _check_hybrid_device(server_args: Any, target: Any) -> None:
    """Refuse a hybrid target on the CPU, whatever is verified."""
    kind = hybrid.recurrent_layers(target)
    if kind is not None and on_cpu({"device": server_args.device}):
        raise FlagError(
            f"DDTREE: the target {server_args.model_path} has recurrent layers of type {kind.name}, and SGLang keeps "
            f"the states of a verify on a GPU. On a CPU neither {flag_name('shadow_linear')} nor "
            f"{flag_name('allow_hybrid_unsafe')} helps. Use a GPU, or drop DDTREE."
        )


def _check_tree_target(server_args: Any, target: Any, config: DDTreeConfig) -> None:
    """Refuse targets whose layers a tree verify would compute wrongly."""
    from sglang.srt.configs.model_config import AttentionArch

    if getattr(target, "attention_arch", None) == AttentionArch.MLA:
        raise FlagError(
            f"DDTREE: the target {server_args.model_path} uses multi-head latent attention (MLA), where a backend may "
            f"ignore a tree's mask. Serve the chain with {flag_name('shadow_linear')}, or drop DDTREE."
        )
    kind, reason = hybrid.recurrent_layers(target), hybrid.unproven(server_args, target, config)
    if kind is not None and reason is not None:
        if not config.allow_hybrid_unsafe:
            raise FlagError(hybrid.refusal(server_args.model_path, kind, reason))
        logger.warning(
            "DDTREE: tree verify on a hybrid target (%s) because of %s: the output is not proven exact, since %s.",
            kind.name,
            flag_name("allow_hybrid_unsafe"),
            reason,
        )
    if getattr(target, "is_hybrid_swa", False) or getattr(target, "attention_chunk_size", None) is not None:
        _refuse_window(server_args.model_path)


def check_loaded_target(server_args: Any, model_runner: Any, config: DDTreeConfig) -> None:
    """Refuse a loaded target that uses a sliding window or a quantised KV cache.

    A config alone does not tell: many name a window that SGLang's model ignores, and a checkpoint can bring its own
    KV dtype.
    """
    if not config.shadow_linear and (model_runner.sliding_window_size or -1) > 0:
        _refuse_window(server_args.model_path)
    if model_runner.kv_cache_dtype.itemsize < 2:
        raise FlagError(
            f"DDTREE: the target {server_args.model_path} brings a quantised KV cache ({model_runner.kv_cache_dtype}), "
            "with which tree verify has not been proven exact. Give --kv-cache-dtype bfloat16."
        )


def _refuse_window(model_path: str) -> None:
    raise FlagError(
        f"DDTREE: the target {model_path} uses sliding-window attention, and SGLang's backends count the window by "
        f"node instead of by position. Serve the chain with {flag_name('shadow_linear')}, or drop DDTREE."
    )
