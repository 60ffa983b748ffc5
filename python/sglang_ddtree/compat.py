"""Every SGLang internal that DDTREE relies on, per supported version.

One entry per name: the parameters we pass or take over (a subset of the signature is enough, so an added
optional parameter does no harm), or None where only the name's existence matters.
"""

import importlib
import inspect
import pkgutil

SUPPORTED_VERSIONS = ("0.5.17",)

_Signature = tuple[str, ...] | None

INTERNALS: dict[str, dict[str, _Signature]] = {
    "0.5.17": {
        # Arguments and registration.
        "sglang.srt.server_args.ServerArgs.add_cli_args": ("parser",),
        "sglang.srt.server_args.ServerArgs.from_cli_args": ("args",),
        "sglang.srt.arg_groups.overrides.resolved_view": ("server_args",),
        "sglang.srt.server_args.ServerArgs.get_model_config": ("self",),
        "sglang.srt.server_args.ServerArgs.override": ("self", "source", "fields"),
        "sglang.srt.speculative.spec_registry.CustomSpecAlgo.create_worker": ("self", "server_args"),
        "sglang.srt.plugins.hook_registry.HookRegistry.register": ("target", "hook", "hook_type"),
        "sglang.srt.plugins.hook_registry.HookType": None,
        "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.register": (
            "name",
            "supports_overlap",
            "validate_server_args",
            "spec_class",
        ),
        "sglang.srt.runtime_context.get_server_args": None,
        "sglang.srt.runtime_context.get_schedule": None,
        "sglang.srt.managers.overlap_utils.FutureMap": (
            "device",
            "spec_algo",
            "req_to_token_pool",
            "needs_cpu_seq_lens",
            "needs_confidence_relay",
        ),
        "sglang.srt.configs.hybrid_arch.mambaish_config": ("model_config",),
        "sglang.srt.configs.hybrid_arch.mamba2_config": ("model_config",),
        "sglang.srt.configs.hybrid_arch.hybrid_gdn_config": ("model_config",),
        "sglang.srt.configs.hybrid_arch.kimi_linear_config": ("model_config",),
        "sglang.srt.configs.hybrid_arch.hybrid_lightning_config": ("model_config",),
        "sglang.srt.configs.Qwen3NextConfig": None,
        "sglang.srt.configs.NemotronHConfig": None,
        "sglang.srt.configs.GraniteMoeHybridConfig": None,
        "sglang.srt.configs.FalconH1Config": None,
        "sglang.srt.configs.mamba_utils.mamba2_state_dtype": ("config",),
        "sglang.srt.configs.mamba_utils.BaseLinearStateParams.mamba_cache_per_req": None,
        "sglang.srt.utils.hf_transformers_utils.get_config": (
            "model",
            "trust_remote_code",
            "revision",
            "model_override_args",
        ),
        "sglang.srt.speculative.dflash_utils.parse_dflash_draft_config": ("draft_hf_config",),
        # Hooked while DDTREE runs.
        "sglang.srt.mem_cache.allocation_sizing.get_alloc_len_per_decode": ("server_args",),
        "sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len": ("server_args",),
        "sglang.srt.speculative.dflash_utils.validate_dflash_request": ("req", "enable_overlap"),
        "sglang.srt.speculative.spec_info.create_dummy_verify_input": (
            "spec_algorithm",
            "server_args",
            "custom_mask",
            "num_tokens_per_req",
            "is_draft_worker",
        ),
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._handle_max_mamba_cache": (
            "self",
            "total_rest_memory",
        ),
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._calculate_mamba_ratio": None,
        "sglang.srt.managers.scheduler.Scheduler.init_req_max_new_tokens": ("self", "req"),
        "sglang.srt.mem_cache.allocation_sizing.get_alloc_reserve_per_decode": ("server_args",),
        "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation": (
            "self",
            "batch",
            "forward_batch",
            "is_verify",
            "capture_hidden_mode",
        ),
        "sglang.srt.managers.schedule_batch.ScheduleBatch": ("prefix_lens", "extend_lens"),
        "sglang.srt.managers.schedule_batch.Req.extend_image_inputs": ("self", "image_inputs"),
        "sglang.srt.managers.schedule_batch.Req.update_finish_state": ("self", "new_accepted_len"),
        # Round statistics.
        "sglang.srt.managers.utils.GenerationBatchResult.copy_to_cpu": (
            "self",
            "return_logprob",
            "return_hidden_states",
        ),
        "sglang.srt.managers.utils._async_d2h": ("t",),
        "sglang.srt.managers.schedule_batch.Req.update_spec_cap_lens_histogram": ("self", "cap_len"),
        "sglang.srt.managers.schedule_batch.Req.finished": None,
        "sglang.srt.managers.scheduler.Scheduler.get_init_info": None,
        "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor": (
            "server_args",
            "metrics_collector",
            "metrics_reporter",
        ),
        "sglang.srt.managers.scheduler_components.batch_result_processor"
        ".SchedulerBatchResultProcessor._resolve_spec_v2_tokens": ("self", "result", "batch"),
        "sglang.srt.managers.scheduler_components.batch_result_processor"
        ".SchedulerBatchResultProcessor._apply_decode_logprobs": (
            "self",
            "req",
            "batch",
            "next_token_id",
            "next_token_logprobs",
            "logits_output",
        ),
        "sglang.srt.managers.scheduler_components.metrics_reporter.get_spec": None,
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics": (
            "self",
            "meta_info",
            "recv_obj",
            "i",
        ),
        "sglang.srt.observability.metrics_collector._StatLoggerDIMixin._counter_cls": None,
        "sglang.srt.observability.metrics_collector._StatLoggerDIMixin._histogram_cls": None,
        "sglang.srt.models.dflash.DFlashDraftModel": None,
        # Attention on the CPU.
        "sglang.srt.layers.attention.attention_registry.ATTENTION_BACKENDS": None,
        "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend.forward_extend": (
            "self",
            "q",
            "k",
            "v",
            "layer",
            "forward_batch",
            "save_kv_cache",
        ),
        "sglang.srt.layers.radix_attention.AttentionType": None,
        "sglang.srt.mem_cache.memory_pool.KVWriteLoc": None,
        "sglang.srt.speculative.draft_worker_common._SUPPORTED_DRAFT_BACKENDS": None,
        # The round.
        "sglang.srt.distributed.get_tp_group": None,
        "sglang.srt.model_executor.forward_batch_info.ForwardMode": None,
        "sglang.srt.model_executor.forward_batch_info.CaptureHiddenMode": None,
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch": (
            "forward_mode",
            "batch_size",
            "input_ids",
            "req_pool_indices",
            "seq_lens",
            "out_cache_loc",
            "seq_lens_sum",
            "seq_lens_cpu",
            "positions",
            "spec_algorithm",
            "spec_info",
            "capture_hidden_mode",
        ),
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new": (
            "batch",
            "model_runner",
            "capture_hidden_mode",
            "return_hidden_states_before_norm",
        ),
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch.compute_spec_mrope_positions": (
            "self",
            "model_runner",
            "batch",
            "seq_positions",
        ),
        "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo": (
            "temperatures",
            "top_ps",
            "top_ks",
            "min_ps",
            "sampling_seed",
            "logit_bias",
            "grammars",
            "grammar_mask",
            "penalizer_orchestrator",
            "return_sampling_masks",
        ),
        "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2": (
            "server_args",
            "gpu_id",
            "ps",
            "nccl_port",
            "target_worker",
        ),
        "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2.forward_batch_generation": (
            "self",
            "batch",
            "on_publish",
            "grammar_barrier",
        ),
        "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2._append_target_hidden_to_draft_kv_by_loc": (
            "self",
            "target_hidden",
            "cache_loc",
            "positions",
            "cache_loc_2d",
            "commit_lens",
        ),
        "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2._make_next_draft_input_decode": (
            "self",
            "bonus_tokens",
            "new_seq_lens",
        ),
        "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2._validate_phase1_sampling_support": (
            "self",
            "batch",
        ),
        "sglang.srt.speculative.dflash_info.DFlashVerifyInput.generate_attn_arg_prefill": (
            "self",
            "req_pool_indices",
            "paged_kernel_lens",
            "paged_kernel_lens_sum",
            "req_to_token",
        ),
        "sglang.srt.speculative.dflash_info_v2.DFlashDraftInputV2": (
            "topk_p",
            "topk_index",
            "bonus_tokens",
            "new_seq_lens",
            "hidden_states",
        ),
        "sglang.srt.speculative.eagle_info.EagleVerifyInput": (
            "draft_token",
            "custom_mask",
            "positions",
            "retrieve_index",
            "retrieve_next_token",
            "retrieve_next_sibling",
            "retrieve_cum_len",
            "spec_steps",
            "topk",
            "draft_token_num",
            "capture_hidden_mode",
            "seq_lens_sum",
            "seq_lens_cpu",
        ),
        "sglang.srt.speculative.eagle_utils.eagle_prepare_for_verify": (
            "verify_input",
            "req_to_token_pool",
            "batch",
            "target_worker",
        ),
        "sglang.srt.speculative.eagle_utils.eagle_prepare_for_decode": ("batch",),
        "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool.move_kv_cache": ("self", "tgt_loc", "src_loc"),
        # data_ptrs and data_strides, of which the round's own move reads where every layer's slots lie.
        "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._init_data_ptrs_and_strides": (),
        "sglang.srt.mem_cache.memory_pool.HybridLinearKVPool.move_kv_cache": ("self", "tgt_loc", "src_loc"),
        # Its parts are asked whether they read ancestor bits, and it commits the accepted nodes' states.
        "sglang.srt.layers.attention.hybrid_linear_attn_backend.HybridLinearAttnBackend": (
            "full_attn_backend",
            "linear_attn_backend",
        ),
        "sglang.srt.layers.attention.hybrid_linear_attn_backend.HybridLinearAttnBackend"
        ".update_mamba_state_after_mtp_verify": (
            "last_correct_step_indices",
            "mamba_track_indices",
            "mamba_steps_to_track",
        ),
        "sglang.srt.speculative.spec_utils.record_stream_each": ("tensors", "stream"),
        "sglang.srt.speculative.spec_utils.record_stream_for_v2_verify": ("batch", "verify_input", "fwd_stream"),
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.get_spec_info": (
            "self",
            "num_tokens",
        ),
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.can_run_graph": (
            "self",
            "forward_batch",
        ),
        # Graphs are timed with batches of their capture.
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.capture_prepare": (
            "self",
            "size",
            "num_tokens",
        ),
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.execute": (
            "self",
            "forward_batch",
        ),
        "sglang.srt.model_executor.model_runner.ModelRunner._decode_cuda_graph_runner_cls": None,
        # A second width of the drafter: what makes its backend and graphs, and what a forward takes them from.
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner": (
            "model_runner",
            "attn_backend",
            "speculative_num_draft_tokens",
        ),
        "sglang.srt.model_executor.model_runner.ModelRunner.decode_num_tokens_per_req": ("self", "num_draft_tokens"),
        "sglang.srt.model_executor.model_runner.ModelRunner._get_attention_backend": ("self", "init_new_workspace"),
        "sglang.srt.model_executor.model_runner.ModelRunner.forward": ("self", "forward_batch"),
        "sglang.srt.utils.get_available_gpu_memory": ("device", "gpu_id", "distributed", "cpu_group"),
        "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2._maybe_build_draft_sampler": None,
        "sglang.srt.speculative.draft_worker_common.make_draft_sampler_capture_hook": ("draft_sampler",),
        "sglang.srt.speculative.draft_worker_common.make_draft_block_spec_info": ("draft_token_num", "device"),
        "sglang.srt.layers.attention.verify_mask.VerifyMask.fits": ("self", "bs"),
        "sglang.srt.layers.attention.triton_backend.ForwardMetadata": ("qo_indptr", "kv_indptr", "window_kv_indptr"),
        "sglang.srt.layers.attention.triton_backend.TritonAttnBackend": (
            "model_runner",
            "skip_prefill",
            "kv_indptr_buf",
        ),
        "sglang.srt.layers.attention.triton_backend.TritonAttnBackend.init_forward_metadata": ("self", "forward_batch"),
        "sglang.srt.layers.attention.triton_backend.TritonAttnBackend.init_forward_metadata_out_graph": (
            "self",
            "forward_batch",
            "in_capture",
        ),
        "sglang.srt.layers.attention.triton_backend.TritonAttnBackend.init_cuda_graph_state": (
            "self",
            "max_bs",
            "max_num_tokens",
            "kv_indices_buf",
            "cuda_graph_num_kv_splits_buf",
        ),
        "sglang.srt.layers.attention.triton_backend.TritonAttnBackend._update_target_verify_buffers": (
            "self",
            "bs",
            "seq_lens",
            "req_pool_indices",
            "spec_info",
        ),
        # What the tree's attention takes the place of; its arguments are read by position.
        "sglang.kernels.ops.attention.extend_attention.extend_attention_fwd": (
            "q_extend",
            "k_extend",
            "v_extend",
            "o_extend",
            "k_buffer",
            "v_buffer",
            "qo_indptr",
            "kv_indptr",
            "kv_indices",
            "custom_mask",
            "is_causal",
            "mask_indptr",
            "max_len_extend",
        ),
        "sglang.srt.speculative.spec_utils.commit_mamba_states_after_verify": (
            "target_worker",
            "batch",
            "accept_lens",
            "accept_index",
            "draft_token_num",
        ),
        "sglang.srt.speculative.spec_utils._sample_simulated_acc_len": (
            "simulate_acc_len",
            "simulate_acc_method",
            "max_len",
        ),
        "sglang.srt.speculative.spec_utils.SIMULATE_ACC_LEN": None,
        "sglang.srt.speculative.spec_utils.GrammarTree.from_device": (
            "retrieve_next_token",
            "retrieve_next_sibling",
            "draft_token",
        ),
        "sglang.srt.speculative.spec_utils.build_grammar_vocab_mask": (
            "reqs",
            "tree",
            "sampling_info",
            "device",
            "barrier",
        ),
        "sglang.srt.constrained.base_grammar_backend.GrammarMask": ("grammar", "vocab_mask"),
        "sglang.kernels.ops.speculative.cache_locs.assign_extend_cache_locs_func": (
            "req_pool_indices",
            "req_to_token",
            "start_offset",
            "end_offset",
            "batch_size",
            "draft_token_num",
            "device",
        ),
        "sglang.kernels.ops.speculative.dflash._prepare_dflash_draft_block_unchecked": (
            "bonus_tokens",
            "prefix_lens",
            "req_pool_indices",
            "req_to_token",
            "block_ids_out",
            "positions_out",
            "cache_loc_out",
            "mask_token_id",
        ),
        "sglang.srt.constrained.xgrammar_backend.XGrammarGrammar.apply_vocab_mask": ("self", "logits", "vocab_mask"),
        "sglang.srt.constrained.xgrammar_backend._allocate_token_bitmask": ("vocab_size", "batch_size"),
        "sglang.srt.constrained.llguidance_backend.GuidanceGrammar.apply_vocab_mask": ("logits", "vocab_mask"),
        "sglang.srt.layers.logprob_processor.compute_spec_v2_logprobs": (
            "batch",
            "logits_output",
            "predict",
            "accept_index",
            "speculative_num_steps",
        ),
        "sglang.srt.layers.sampler.Sampler.forward": (
            "self",
            "logits_output",
            "sampling_info",
            "return_logprob",
            "top_logprobs_nums",
            "token_ids_logprobs",
            "positions",
        ),
        "sglang.srt.utils.async_probe.sanitize_nan_logits": None,
        "sglang.srt.distributed.parallel_state.graph_capture": ("stream",),
        "sglang.srt.utils.common.get_cuda_graph_batch_size_alignment": ("server_args",),
        "sglang.srt.model_executor.runner_utils.pool.get_or_create_global_graph_memory_pool": ("device_module",),
        "sglang.kernels.ops.speculative.fused_kv_materialize.FusedKVMaterializeHelper._ensure_workspace": (
            "self",
            "total_ctx",
            "dtype",
        ),
        "sglang.srt.managers.scheduler.GenerationBatchResult": (
            "logits_output",
            "next_token_ids",
            "accept_lens",
            "can_run_cuda_graph",
            "next_draft_input",
            "speculative_num_draft_tokens",
            "new_seq_lens",
            "extra_keep_alive_refs",
        ),
    }
}


class UnsupportedSGLang(RuntimeError):
    """The installed SGLang is not one that DDTREE knows."""

    def __init__(self, reason: str):
        supported = ", ".join(SUPPORTED_VERSIONS)
        super().__init__(
            f"DDTREE cannot start: {reason}. Supported SGLang versions: {supported}. "
            f"Install one with: pip install sglang=={SUPPORTED_VERSIONS[0]}"
        )


def installed_version() -> str:
    return str(importlib.import_module("sglang").__version__)


def _parameters(found: object) -> set[str]:
    return set(inspect.signature(found).parameters)  # type: ignore[arg-type]


def problems(version: str) -> list[str]:
    """Every internal of ``version`` that is missing or has another signature, in words."""
    found_problems = []
    for name, expected in INTERNALS[version].items():
        try:
            found = pkgutil.resolve_name(name)
        except (ImportError, AttributeError) as error:
            found_problems.append(f"{name} is missing ({error})")
            continue
        if expected is None:
            continue
        try:
            # A hook wraps with functools.wraps, so the original's signature shows through.
            lacking = set(expected) - {"self", "cls"} - _parameters(found)
        except (TypeError, ValueError) as error:
            found_problems.append(f"{name} has no readable signature ({error})")
            continue
        if lacking:
            found_problems.append(f"{name} has no parameter {', '.join(sorted(lacking))}")
    return found_problems


def check() -> None:
    """Check the installed SGLang.

    Raises:
        UnsupportedSGLang: names the version or every internal that does not match.
    """
    version = installed_version()
    if version not in SUPPORTED_VERSIONS:
        raise UnsupportedSGLang(f"SGLang {version} is installed")
    found = problems(version)
    if found:
        raise UnsupportedSGLang(f"SGLang {version} differs from what was expected: " + "; ".join(found))
