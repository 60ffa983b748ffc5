"""DDTreeAlgorithm: what SGLang asks of a speculative algorithm, answered for DDTREE."""

import dataclasses
import logging
from typing import Any

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from sglang_ddtree import compat, requirements
from sglang_ddtree.flags import ALGORITHM, config_of

logger = logging.getLogger(__name__)

DEFAULT_MAX_RUNNING_REQUESTS = 48


class DDTreeAlgorithm(CustomSpecAlgo):
    """DDTREE as SGLang sees it: of the DFLASH family, with a verify width that differs from the draft's."""

    def is_dflash_family(self) -> bool:
        # Target layer capture, the draft's share of the KV memory and the stateful decode preparation.
        return True

    def supports_target_verify_for_draft(self) -> bool:
        return True

    def supports_grammar_overlap(self) -> bool:
        return True

    def has_draft_kv(self) -> bool:
        # The draft's keys share the target's slots; no branch owns pages of its own.
        return False

    def need_topk(self) -> bool:
        return False

    def carries_draft_hidden_states(self) -> bool:
        return False

    def create_future_map(
        self,
        device: Any,
        req_to_token_pool: Any,
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> Any:
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay)

    def get_num_tokens_per_req_for_target_verify(self, num_draft_tokens: int, is_draft_worker: bool) -> int:
        # The graph runner asks with the target's N for the drafter too, whose block is D wide.
        from sglang.srt.runtime_context import get_server_args

        server_args = get_server_args()
        config = config_of(server_args)
        if is_draft_worker:
            return config.require_block_size()
        graphs = getattr(server_args.cuda_graph_config, "decode", None)
        if not config.packed or graphs is None or not graphs.bs:
            return num_draft_tokens
        # Packed rounds: what all requests together verify, as if it were dealt out evenly.
        from sglang.srt.speculative.ddtree_sizes import most_tokens

        requests = min(max(graphs.bs), server_args.max_running_requests)
        return -(-most_tokens(requests, config.budget) // requests)

    def handle_server_args(self, server_args: Any) -> None:
        """Check the models, then fill in what the generic code reads. Mutates ``server_args``."""
        config = config_of(server_args)
        requirements.check_resolved(server_args)
        # First: what else is checked depends on the budget.
        config = requirements.settle_auto_by_target(config, server_args, server_args.get_model_config())
        config = requirements.settle_auto_by_graphs(config, server_args)
        config = dataclasses.replace(config, block_size=requirements.check_models(server_args, config))
        server_args._ddtree_config = config

        # One step whose branching is the cap: only the sizes derived from these fields matter.
        server_args.speculative_num_steps = 1
        server_args.speculative_eagle_topk = 1 if config.shadow_linear else max(2, config.topk)
        server_args.speculative_num_draft_tokens = config.verify_width
        server_args._ddtree_requests_given = server_args.max_running_requests is not None
        if server_args.max_running_requests is None:
            server_args.max_running_requests = DEFAULT_MAX_RUNNING_REQUESTS
            logger.warning("DDTREE: --max-running-requests not given, using %d.", DEFAULT_MAX_RUNNING_REQUESTS)
        if server_args.enable_mixed_chunk:
            server_args.enable_mixed_chunk = False
            logger.warning("DDTREE: mixed chunked prefill is switched off.")
        _resolve_overlap(server_args)
        if config.shadow_linear:
            logger.info(
                "DDTREE: shadow-linear mode is enabled: the chain is served, trees of budget %d are only counted.",
                config.budget,
            )
        if config.auto:
            alike = ", and all requests of a round have as many" if config.uniform else ""
            logger.info("DDTREE: the budget follows the load, up to %d nodes per request%s.", config.budget, alike)
        logger.info(
            "DDTREE: block size %d, verify width %d, %d candidates per position, at most %d drafts per round.",
            config.block_size,
            config.verify_width,
            config.topk,
            config.max_depth,
        )

    def create_worker(self, server_args: Any) -> type:
        """The worker class, in the scheduler process: the one place where SGLang itself is hooked."""
        from sglang_ddtree import activation

        activation.activate()
        return super().create_worker(server_args)


def _resolve_overlap(server_args: Any) -> None:
    """Switch overlap scheduling off where it cannot be had, with a line in the log."""
    if not server_args.disable_overlap_schedule and not requirements.can_overlap({"device": server_args.device}):
        server_args.disable_overlap_schedule = True
        logger.warning("DDTREE: overlap scheduling is switched off.")


def _worker_class(server_args: Any) -> type:
    from sglang.srt.speculative.ddtree_worker import DDTreeWorker

    return DDTreeWorker


def register() -> None:
    """Register DDTREE with SGLang; an unsupported SGLang is reported when DDTREE is asked for."""
    SpeculativeAlgorithm.register(
        ALGORITHM,
        supports_overlap=True,
        validate_server_args=lambda server_args: compat.check(),
        spec_class=DDTreeAlgorithm,
    )(_worker_class)
