"""Everything DDTREE changes in SGLang, done only when DDTREE is what the server runs.

Called in the scheduler process when the worker class is asked for: after the target is loaded, before any
memory pool, attention backend or graph exists.
"""

from collections.abc import Callable
from typing import Any

from sglang_ddtree import overlay, requirements
from sglang_ddtree.flags import ALGORITHM, config_of

_active = False


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

    return refusal(req)


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

    return DDTreeVerifyInput.create_dummy_input(config_of(server_args), custom_mask)


def _image_inputs_hook(original: Callable[..., None], req: Any, image_inputs: Any) -> None:
    """Images join a request after it was validated: the drafter knows no image positions."""
    from sglang_ddtree.requests import message

    original(req, image_inputs)
    req.set_finish_with_abort(message("multimodal inputs"))


_HOOKS: dict[str, Callable[..., Any]] = {
    "sglang.srt.mem_cache.allocation_sizing.get_alloc_len_per_decode": _alloc_len_hook,
    "sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len": _row_headroom_hook,
    "sglang.srt.speculative.dflash_utils.validate_dflash_request": _validate_request_hook,
    "sglang.srt.speculative.spec_info.create_dummy_verify_input": _dummy_verify_input_hook,
    "sglang.srt.managers.schedule_batch.Req.extend_image_inputs": _image_inputs_hook,
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


def activate() -> None:
    """Lay the overlay, hook SGLang, and on the CPU put the tree attention in place. Idempotent."""
    global _active
    if _active:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    overlay.lay()
    for target, hook in _HOOKS.items():
        HookRegistry.register(target, hook, HookType.AROUND)
    HookRegistry.apply_hooks()
    if not requirements.has_gpu():
        _use_torch_tree_mask()
    _active = True
