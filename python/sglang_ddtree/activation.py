"""Everything DDTREE changes in SGLang, done only when DDTREE is what the server runs.

Nearly all of it in the scheduler process, when the worker class is asked for: after the target is loaded, before any
memory pool, attention backend or graph exists. The process that answers HTTP, where the arguments are parsed, adds
the round statistics to the answers.
"""

import logging
from collections.abc import Callable
from typing import Any

from sglang_ddtree import overlay, requirements
from sglang_ddtree.flags import ALGORITHM, config_of

logger = logging.getLogger(__name__)

_active = False
_answering = False
_RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor"


def _serves_ddtree(server_args: Any) -> bool:
    return getattr(server_args, "speculative_algorithm", None) == ALGORITHM


def _alloc_len_hook(original: Callable[..., int], server_args: Any = None) -> int:
    """Slots per decode step: the draft's block can be wider than the tree."""
    if server_args is None:
        from sglang.srt.runtime_context import get_server_args

        server_args = get_server_args()
    length = original(server_args)
    return max(length, config_of(server_args).slots_per_round) if _serves_ddtree(server_args) else length


def _row_headroom_hook(original: Callable[..., int], server_args: Any) -> int:
    """Columns of ``req_to_token`` past the context length.

    Two rounds are reserved past the committed tokens and rounded up to a page. A row without room for them
    would spill into its neighbour near the context limit (sglang #33579, #26972).
    """
    extra = original(server_args)
    if not _serves_ddtree(server_args):
        return extra
    reserved = 2 * config_of(server_args).slots_per_round
    return max(extra, reserved + server_args.page_size + 4)


def _validate_request_hook(original: Callable[..., str | None], req: Any, enable_overlap: bool) -> str | None:
    from sglang_ddtree.requests import refusal

    reason = refusal(req)
    if reason is not None:
        # A refused request still passes through a batch, and may meet one there that asks for log-probabilities.
        req.logprob.top_logprobs_num = 0
    return reason


def _dummy_verify_input_hook(
    original: Callable[..., Any],
    spec_algorithm: Any,
    server_args: Any,
    custom_mask: Any,
    num_tokens_per_req: int,
    is_draft_worker: bool,
) -> Any:
    """Warm-up input of the target's verify: a tree carries links and a mask, DFLASH's chain has neither."""
    if is_draft_worker or not _serves_ddtree(server_args):
        return original(spec_algorithm, server_args, custom_mask, num_tokens_per_req, is_draft_worker)
    from sglang.srt.speculative.dflash_info import DDTreeVerifyInput

    info = DDTreeVerifyInput.create_dummy_input(config_of(server_args), custom_mask)
    # With packed graphs it is not the verify width.
    info.draft_token_num = num_tokens_per_req
    return info


def _state_memory_hook(original: Callable[..., float], self: Any, total_rest_memory: float) -> float:
    """SGLang has sized the pool of recurrent states: say what fits, and fail where it is less than was asked for."""
    if not _serves_ddtree(self.server_args):
        return original(self, total_rest_memory)
    from sglang.srt.runtime_context import get_schedule

    from sglang_ddtree import state_memory

    # Before SGLang fills in its own.
    cache_size = get_schedule().max_mamba_cache_size
    try:
        left = original(self, total_rest_memory)
    except RuntimeError as error:
        state_memory.check(self, total_rest_memory, None, cache_size)
        raise error
    state_memory.check(self, total_rest_memory, left, cache_size)
    return left


def _max_new_tokens_hook(original: Callable[..., None], self: Any, req: Any) -> None:
    """A request ends before the KV pool has no room for its next round."""
    original(self, req)
    if _serves_ddtree(self.server_args):
        from sglang_ddtree import pool

        pool.end_before_the_pool(self, req)


def _image_inputs_hook(original: Callable[..., None], req: Any, image_inputs: Any) -> None:
    """Images join a request after it was validated: the drafter knows no image positions."""
    from sglang_ddtree.requests import message

    original(req, image_inputs)
    req.set_finish_with_abort(message("multimodal inputs"))


def _grammar_mask_hook(original: Callable[..., None], self: Any, logits: Any, vocab_mask: Any) -> None:
    """Structured output on the CPU: SGLang knows the GPU's kernels alone, xgrammar has one of its own."""
    if logits.device.type != "cpu":
        original(self, logits=logits, vocab_mask=vocab_mask)
        return
    import xgrammar

    xgrammar.apply_token_bitmask_inplace(logits, vocab_mask)


def _guidance_mask_hook(original: Callable[..., None], logits: Any, vocab_mask: Any) -> None:
    """llguidance on the CPU: its own kernel is compiled when first used, for which a server may lack the compiler.

    Its mask has xgrammar's layout.
    """
    if logits.device.type != "cpu":
        original(logits=logits, vocab_mask=vocab_mask)
        return
    import xgrammar

    xgrammar.apply_token_bitmask_inplace(logits, vocab_mask)


def _grammar_bitmask_hook(original: Callable[..., Any], vocab_size: int, batch_size: int) -> Any:
    """SGLang pins this memory for the copy to a GPU, which PyTorch refuses where there is none."""
    if requirements.has_gpu():
        return original(vocab_size, batch_size)
    import xgrammar

    return xgrammar.allocate_token_bitmask(batch_size, vocab_size)


def _resolve_tokens_hook(original: Callable[..., Any], self: Any, result: Any, batch: Any) -> Any:
    """A round's tokens have reached the host: count the round."""
    from sglang_ddtree.metrics import count_rounds

    tokens = original(self, result, batch)
    count_rounds(self, result, batch)
    return tokens


def _decode_logprobs_hook(
    original: Callable[..., None], self: Any, *, req: Any, next_token_id: list[int], **rest: Any
) -> None:
    """One log-probability per returned token: what follows a stop within an accepted run is not returned."""
    if req.finished_len is not None:
        next_token_id = next_token_id[: max(0, req.finished_len - len(req.logprob.output_token_logprobs_val))]
    original(self, req=req, next_token_id=next_token_id, **rest)


def _finish_state_hook(original: Callable[..., None], self: Any, new_accepted_len: int = 1) -> None:
    """A request ends where it would without speculation, wherever in an accepted run that is."""
    from sglang_ddtree.stops import end_in_run

    end_in_run(original, self, new_accepted_len)


def _init_info_hook(original: Callable[..., dict[str, Any]], self: Any) -> dict[str, Any]:
    """What the scheduler says about itself when it is ready, which ``/server_info`` shows."""
    info = original(self)
    if _serves_ddtree(self.server_args):
        info["ddtree"] = requirements.describe(config_of(self.server_args), self.server_args, self.model_config)
    return info


def _spec_metrics_hook(
    original: Callable[..., None], self: Any, meta_info: dict[str, Any], recv_obj: Any, i: int
) -> None:
    """``meta_info`` of a finished request: the round statistics, and a rate with a tree's denominator."""
    original(self, meta_info, recv_obj, i)
    if _serves_ddtree(self.server_args):
        from sglang_ddtree.round_stats import complete_meta_info

        complete_meta_info(config_of(self.server_args), meta_info)


GRAMMAR_HOOKS: dict[str, Callable[..., Any]] = {
    "sglang.srt.constrained.xgrammar_backend.XGrammarGrammar.apply_vocab_mask": _grammar_mask_hook,
    "sglang.srt.constrained.xgrammar_backend._allocate_token_bitmask": _grammar_bitmask_hook,
    "sglang.srt.constrained.llguidance_backend.GuidanceGrammar.apply_vocab_mask": _guidance_mask_hook,
}

_HOOKS: dict[str, Callable[..., Any]] = {
    "sglang.srt.mem_cache.allocation_sizing.get_alloc_len_per_decode": _alloc_len_hook,
    "sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len": _row_headroom_hook,
    "sglang.srt.speculative.dflash_utils.validate_dflash_request": _validate_request_hook,
    "sglang.srt.speculative.spec_info.create_dummy_verify_input": _dummy_verify_input_hook,
    "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._handle_max_mamba_cache": _state_memory_hook,
    "sglang.srt.managers.schedule_batch.Req.extend_image_inputs": _image_inputs_hook,
    "sglang.srt.managers.schedule_batch.Req.update_finish_state": _finish_state_hook,
    "sglang.srt.managers.scheduler.Scheduler.get_init_info": _init_info_hook,
    "sglang.srt.managers.scheduler.Scheduler.init_req_max_new_tokens": _max_new_tokens_hook,
    **GRAMMAR_HOOKS,
    f"{_RESULTS}.SchedulerBatchResultProcessor._resolve_spec_v2_tokens": _resolve_tokens_hook,
    f"{_RESULTS}.SchedulerBatchResultProcessor._apply_decode_logprobs": _decode_logprobs_hook,
}

# In the process that parses the arguments and answers HTTP.
_ANSWER_HOOKS: dict[str, Callable[..., Any]] = {
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics": _spec_metrics_hook,
}


def _use_torch_tree_mask() -> None:
    """Serve ``torch_native`` with the tree-capable backend, for target and drafter."""
    import sglang.srt.speculative.draft_worker_common as draft_worker_common
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.layers.attention.torch_tree_mask import TorchTreeMaskAttnBackend

    ATTENTION_BACKENDS["torch_native"] = TorchTreeMaskAttnBackend
    supported = draft_worker_common._SUPPORTED_DRAFT_BACKENDS
    if "torch_native" not in supported:
        draft_worker_common._SUPPORTED_DRAFT_BACKENDS = (*supported, "torch_native")


def _use_triton_tree_mask() -> None:
    """Serve ``triton`` with the backend that reads ancestor bits; for prefill and for decode it is its parent."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.layers.attention.triton_tree_backend import TritonTreeMaskAttnBackend

    logger.info("DDTREE: the attention backend triton verifies trees by ancestor bits, without a dense mask.")
    ATTENTION_BACKENDS["triton"] = TritonTreeMaskAttnBackend
    TritonTreeMaskAttnBackend.tree_for_chains = requirements.is_sm120()


class _AcceptRateSpec:
    """SGLang's speculative arguments with the width that the accept rate is divided by: one node per depth."""

    def __init__(self, spec: Any, max_depth: int):
        self._spec = spec
        self.speculative_num_draft_tokens = max_depth + 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._spec, name)


def _divide_accept_rate_by_depth() -> None:
    """Let the log, ``/v1/loads`` and Prometheus divide accepted drafts by what a round can accept.

    SGLang's reporter divides by the drafted nodes, of which a path can hold but one per depth. It asks for the
    arguments nowhere else, so that only its own name for them is replaced.
    """
    from sglang.srt.managers.scheduler_components import metrics_reporter
    from sglang.srt.runtime_context import get_server_args

    original = metrics_reporter.get_spec

    def get_spec() -> Any:
        return _AcceptRateSpec(original(), config_of(get_server_args()).max_depth)

    metrics_reporter.get_spec = get_spec


def _apply(hooks: dict[str, Callable[..., Any]]) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook in hooks.items():
        HookRegistry.register(target, hook, HookType.AROUND)
    HookRegistry.apply_hooks()


def activate_answers() -> None:
    """Hook the process that answers HTTP. Idempotent."""
    global _answering
    if not _answering:
        _apply(_ANSWER_HOOKS)
        _answering = True


def activate() -> None:
    """Lay the overlay, hook SGLang, and on the CPU put the tree attention in place. Idempotent."""
    global _active
    if _active:
        return
    overlay.lay()
    _apply(_HOOKS)
    _divide_accept_rate_by_depth()
    if not requirements.has_gpu():
        _use_torch_tree_mask()
    if requirements.device_round():
        _use_triton_tree_mask()
    _active = True
