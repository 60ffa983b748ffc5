"""DDTreeWorker: draft a block, build a tree from it, verify the tree in one target forward, commit a path.

DDTree (Diffusion Draft Tree, arXiv 2604.12989) on SGLang's DFLASH worker: the drafter and its KV cache are
DFLASH's; the prefill is DFLASH's without its wait; the draft tail, verify and commit are a tree's.
"""

from __future__ import annotations

import logging
import weakref
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import cached_property, partial
from itertools import product
from typing import Any, TypeVar

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.layers.attention.triton_tree_backend import reads_ancestor_bits
from sglang.srt.layers.logprob_processor import compute_spec_v2_logprobs
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.runtime_context import get_exec
from sglang.srt.speculative import ddtree_timing
from sglang.srt.speculative.ddtree_auto import AutoBudget, AutoRound, request_classes
from sglang.srt.speculative.ddtree_captured_width import CapturedWidth, capture_width
from sglang.srt.speculative.ddtree_commit_graph import (
    CommitGraphs,
    Committed,
    VerifyTail,
    cuda_capture,
    with_own_workspace,
)
from sglang.srt.speculative.ddtree_cost import CostTable
from sglang.srt.speculative.ddtree_cost_cache import cost_table, identity_of
from sglang.srt.speculative.ddtree_draft_pass import DraftPass
from sglang.srt.speculative.ddtree_draft_tail import DraftTail, candidates
from sglang.srt.speculative.ddtree_graph_runner import DDTreeVerifyGraphRunner, ragged_layout
from sglang.srt.speculative.ddtree_kv_move import movable, move_accepted
from sglang.srt.speculative.ddtree_packed_graph import PackedCommitGraphs
from sglang.srt.speculative.ddtree_prefill import prompt_positions
from sglang.srt.speculative.ddtree_ragged import MAX_NODES, PackedWalk
from sglang.srt.speculative.ddtree_result import DDTreeBatchResult
from sglang.srt.speculative.ddtree_round import (
    DeviceRound,
    PackedTree,
    RoundShape,
    RoundTree,
    TorchRound,
    Uniform,
    node_worth,
    root_trees,
)
from sglang.srt.speculative.ddtree_sampling import choose_tokens, takes_likeliest
from sglang.srt.speculative.ddtree_simulation import is_simulating, simulate_packed, simulate_walk
from sglang.srt.speculative.ddtree_sizes import draft_widths, token_buckets, uniform_widths
from sglang.srt.speculative.ddtree_stats import shadow_stats
from sglang.srt.speculative.ddtree_topk import local_vocabulary
from sglang.srt.speculative.ddtree_utils import CommitPlan, DraftTree, WalkResult, plan_commit
from sglang.srt.speculative.dflash_info import DDTreeDraftInput, DDTreeVerifyInput
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from sglang.srt.speculative.draft_worker_common import make_draft_sampler_capture_hook
from sglang.srt.speculative.eagle_utils import eagle_prepare_for_verify
from sglang.srt.speculative.spec_utils import (
    GrammarTree,
    build_grammar_vocab_mask,
    commit_mamba_states_after_verify,
    record_stream_each,
    record_stream_for_v2_verify,
)
from sglang.srt.utils import get_available_gpu_memory
from sglang_ddtree.flags import AUTO, FIXED_BUDGET, config_of, flag_name
from sglang_ddtree.requirements import check_loaded_target, device_round

logger = logging.getLogger(__name__)

CommittedRound = TypeVar("CommittedRound", bound=Committed)
# Under the budget auto: rounds per decision.
_DECIDE_EVERY = 8
# Free memory for graphs of another width, a drafter's or the target's: SGLang wants 1 GB for a drafter's, and the
# buffers of an attention backend may be as large.
_OTHER_WIDTH_GB = 2.0


class DDTreeWorker(DFlashWorkerV2):
    """Speculative worker of ``--speculative-algorithm DDTREE``.

    D is the drafter's block size, N the verify width (budget + 1), bs the running requests. In shadow-linear
    mode the tree is DFLASH's chain: N = D, one candidate per position, causal verify.
    """

    # Set by the parent.
    _fused_kv_helper: Any

    def __init__(self, server_args: Any, gpu_id: int, ps: Any, nccl_port: int, target_worker: Any) -> None:
        self.config = config_of(server_args)
        check_loaded_target(server_args, target_worker.model_runner, self.config)
        draft_args = deepcopy(server_args)
        # The drafter is a chain of D whatever the tree: with the target's topk its attention backend would
        # look for a tree mask.
        draft_args.override(
            "ddtree.draft",
            speculative_num_draft_tokens=self.config.require_block_size(),
            speculative_eagle_topk=1,
        )
        super().__init__(draft_args, gpu_id, ps, nccl_port, target_worker)
        # What metrics report as a round's proposals.
        self.speculative_num_draft_tokens = self.config.verify_width
        # Refuse a head that the drafter's probabilities cannot be computed with now, not in the first round.
        local_vocabulary(getattr(target_worker.model_runner.model, "lm_head", None))
        # The drafter embeds its block itself, also within its CUDA graph: SGLang's eager runner would round
        # embeddings handed to it to bfloat16.
        self.draft_model.forward_embed = self._embed_block
        self._round: TorchRound = DeviceRound() if device_round() else TorchRound()
        # Read when the target's graphs are captured, which is later: SGLang's own runner would capture no mask.
        target_worker.model_runner._decode_cuda_graph_runner_cls = lambda: DDTreeVerifyGraphRunner
        self._verify_tail = VerifyTail()
        self._commit_graphs: CommitGraphs | PackedCommitGraphs | None = None
        # By width, ascending; the last is the drafter's own.
        self._draft_passes: dict[int, DraftPass] = {}
        # The target's, by nodes per request, of uniform rounds with fewer than the widest tree has; and behind whose
        # graphs they were captured, which SGLang may drop.
        self._uniform: dict[int, CapturedWidth] = {}
        self._uniform_of: Callable[[], Any] | None = None
        self._auto: AutoBudget | None = None
        self._auto_round: AutoRound | None = None

    def _embed_block(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The target's embeddings [tokens, hidden], in the drafter's dtype."""
        embed = self.target_worker.model_runner.model.get_input_embeddings()
        return embed(input_ids).to(self.draft_model.fc.weight.dtype)

    # --- What DFLASH's set-up asks of a subclass.

    def _maybe_build_draft_sampler(self) -> DraftTail:
        """What SGLang captures behind the drafter, in the drafter's graph."""
        return self._draft_tail(self.block_size)

    def _draft_tail(self, width: int) -> DraftTail:
        return DraftTail(
            lm_head=self.target_worker.model_runner.model.lm_head,
            block_size=width,
            topk=self.config.topk,
            max_bs=max(get_exec().graph.cuda_graph_config.decode.bs),
            tp_group=get_tp_group(),
            device=self.device,
        )

    def init_attention_backends(self) -> None:
        """Before any graph is captured, and behind the memory pools."""
        super().init_attention_backends()
        if self._commits_on_device():
            self.target_worker.model_runner.capture_tail_hooks.append(self._verify_tail)

    def init_cuda_graphs(self) -> None:
        super().init_cuda_graphs()
        runner = self.draft_model_runner.decode_cuda_graph_runner
        if not isinstance(runner, DecodeCudaGraphRunner):
            # Graphs are off, and what runs eagerly takes any width.
            forward = self.draft_model_runner.forward
            self._draft_passes = {width: self._draft_pass(width, forward, None) for width in self._draft_widths()}
            self._start_auto({})
            return
        # A graph of another width would never be replayed, and the drafter would run eagerly without a word.
        if runner.captured_req_width != self.block_size:
            raise RuntimeError(
                f"DDTREE: the drafter's CUDA graphs were captured {runner.captured_req_width} tokens wide, its block "
                f"is {self.block_size}."
            )
        if self.ps.tp_rank == 0:
            logger.info(
                "DDTREE: the drafter, its head and %d candidates per position run from one CUDA graph.",
                self.config.topk,
            )
        own = self._draft_pass(self.block_size, self.draft_model_runner.forward, self._draft_sampler)
        drafters = {self.block_size: runner}
        self._draft_passes = {self.block_size: own}
        # First what every server needs: the graphs of narrower drafts take what memory is left.
        self._capture_commits()
        self._capture_uniform()
        for width in reversed(self._draft_widths()[:-1]):
            made = self._capture_narrow_draft(width)
            if made is None:
                break
            self._draft_passes[width], drafters[width] = made
        self._draft_passes = dict(sorted(self._draft_passes.items()))
        for draft_pass in self._draft_passes.values():
            draft_pass.warm_up()
        self._start_auto(drafters)

    def _draft_widths(self) -> tuple[int, ...]:
        """Positions that a round may draft, ascending; the last is the drafter's block."""
        return draft_widths(self.block_size) if self.config.auto else (self.block_size,)

    def _draft_pass(self, width: int, forward: Callable[[ForwardBatch], Any], tail: DraftTail | None) -> DraftPass:
        return DraftPass(
            width,
            forward,
            self._candidates,
            tail=tail,
            mask_token_id=self._mask_token_id,
            req_to_token=self.model_runner.req_to_token_pool.req_to_token,
            by_kernel=self._round.on_device and self._use_triton_prepare_block,
        )

    def _capture_narrow_draft(self, width: int) -> tuple[DraftPass, DecodeCudaGraphRunner] | None:
        """A pass of fewer positions with graphs of its own, and these; None where there is no memory for them."""
        free = self._free_gb()
        if free < _OTHER_WIDTH_GB:
            logger.warning(
                "DDTREE: no graphs for drafts of %d positions, because only %.2f GB of GPU memory are free; all rounds "
                "draft more. Lower --mem-fraction-static to have them.",
                width,
                free,
            )
            return None
        tail = self._draft_tail(width)
        captured = capture_width(self.draft_model_runner, width, [make_draft_sampler_capture_hook(tail)])
        if self.ps.tp_rank == 0:
            logger.info("DDTREE: drafts of %d positions run from CUDA graphs of their own.", width)
        return self._draft_pass(width, captured.forward, tail), captured.graphs

    def _free_gb(self) -> float:
        """GPU memory that is free, the least of all ranks, which must all capture or none."""
        group = get_tp_group()
        return get_available_gpu_memory(
            self.device, self.gpu_id, distributed=group.world_size > 1, cpu_group=group.cpu_group
        )

    def _capture_uniform(self, serving: bool = False) -> None:
        """The target's backends and graphs of uniform rounds with fewer nodes than the widest tree, behind its own.

        Args:
            serving: where there is no memory for them such rounds run without graphs.

        Raises:
            RuntimeError: there is no memory for them, at start.
        """
        runner = self._target_graphs()
        self._uniform = {}
        if not self.config.uniform or not isinstance(runner, DDTreeVerifyGraphRunner):
            return
        self._uniform_of = weakref.ref(runner)
        model_runner = self.target_worker.model_runner
        for nodes in reversed(uniform_widths(self.config.budget)[:-1]):
            free = self._free_gb()
            if free < _OTHER_WIDTH_GB and serving:
                logger.warning(
                    "DDTREE: no graphs of the target for %d nodes per request and fewer, because only %.2f GB of GPU "
                    "memory are free: such rounds are launched kernel by kernel.",
                    nodes,
                    free,
                )
                return
            if free < _OTHER_WIDTH_GB:
                raise RuntimeError(
                    f"DDTREE: {flag_name('budget')} {AUTO} needs graphs of the target for {nodes} nodes per request, "
                    f"and only {free:.2f} GB of GPU memory are free, of {_OTHER_WIDTH_GB:g}. Lower "
                    f"--mem-fraction-static, --cuda-graph-max-bs-decode or {flag_name('max_budget')} (now "
                    f"{self.config.budget}), or give a number, e.g. {flag_name('budget')} {FIXED_BUDGET}."
                )
            self._uniform[nodes] = capture_width(model_runner, nodes, model_runner.capture_tail_hooks)
        if self.ps.tp_rank == 0:
            names = ", ".join(str(nodes) for nodes in uniform_widths(self.config.budget))
            logger.info("DDTREE: the target verifies %s nodes per request from CUDA graphs of their own.", names)

    def _warm_up_uniform(self) -> None:
        """Compile the steps between the forwards for every number of nodes, before any request waits for it."""
        if not self._round.on_device:
            return
        shapes = product(uniform_widths(self.config.budget), self._draft_passes, (1, 2))
        # A kernel is compiled once for a single request and once for more.
        for nodes, drafted, bs in shapes:
            zeros = torch.zeros(bs, dtype=torch.int64, device=self.device)
            tree = root_trees(zeros, zeros)
            if nodes > 1:
                ids = torch.arange(self.config.topk, device=self.device).repeat(bs, drafted - 1, 1)
                tree = self._round.build(zeros, ids, torch.zeros_like(ids, dtype=torch.float32), nodes - 1, zeros)
            slots = torch.zeros_like(tree.tree.tokens)
            walk, _ = self._round.commit(tree, slots, min(self.config.max_depth, nodes - 1), zeros, slots)
            self._round.stats(tree.tree, walk)

    def _start_auto(self, drafters: Mapping[int, Any]) -> None:
        """What decides the budget round by round, once it is known which totals have graphs, and what they cost.

        Args:
            drafters: the drafter's graph runners by width, if graphs are on.
        """
        if not self.config.auto:
            return
        runner = self._target_graphs()
        buckets = getattr(runner, "capture_num_tokens", None)
        if not buckets:
            most = self.target_worker.model_runner.max_running_requests
            buckets = token_buckets(most, self.config.budget)
        group = get_tp_group()
        widths = uniform_widths(self.config.budget) if self.config.uniform else ()
        self._auto = AutoBudget(
            self.config,
            buckets=buckets,
            draft_widths=tuple(self._draft_passes),
            decide=partial(_first_ranks, group) if group.world_size > 1 else None,
            new_event=_recorded_event if torch.device(self.device).type == "cuda" else None,
            widths=widths[1:],
            every=_DECIDE_EVERY,
        )
        if widths:
            self._warm_up_uniform()
        commits = self._commit_graphs
        if not self._uniform and not isinstance(commits, PackedCommitGraphs):
            if self.ps.tp_rank == 0:
                logger.warning(
                    "DDTREE: no CUDA graphs hold whole rounds here, so that there are no times to decide by: every "
                    "request has about %d nodes. A number as %s takes less memory.",
                    min(FIXED_BUDGET, self.config.budget),
                    flag_name("budget"),
                )
            return
        most = max(max(graphs.capture_bs) for graphs in (runner, *drafters.values()))
        identity = identity_of(self.server_args, self.config, widths or buckets, tuple(self._draft_passes), most)
        measure: Callable[[], CostTable]
        if self._uniform:
            targets = {nodes: captured.graphs for nodes, captured in self._uniform.items()}
            targets[self.config.verify_width] = runner
            measure = partial(ddtree_timing.measure_uniform, drafters=drafters, targets=targets, identity=identity)
        else:
            measure = partial(
                ddtree_timing.measure,
                drafters=drafters,
                target=runner,
                commits=commits,
                max_budget=self.config.budget,
                identity=identity,
            )
        if group.world_size > 1:
            self._auto.cost = cost_table(identity, measure, partial(_first_agrees, group))
        else:
            self._auto.cost = cost_table(identity, measure)
        # A timed graph tells the scheduler that it has read its inputs; the first request's has not.
        self.target_worker.model_runner.war_fastpath_read_done_event = None

    def _capture_commits(self) -> None:
        """Graphs of what follows the target's choices, behind the target's own graphs; none where those are none."""
        runner = self._target_graphs()
        self._commit_graphs = None
        if not self._commits_on_device() or not isinstance(runner, DDTreeVerifyGraphRunner):
            return
        # Warming up runs what will be captured: with the dummy slot, not with those of whatever ran last.
        runner.buffers.reset_index_buffers()
        context, capture = cuda_capture(self.device)
        original = self._fused_kv_helper
        made: Any = partial(CommitGraphs, feed=self._feed_drafter)
        if self.config.packed:
            made = partial(PackedCommitGraphs, feed=self._feed_rows)
        try:
            if original is not None:
                self._fused_kv_helper = with_own_workspace(original)
            with context:
                self._commit_graphs = made(
                    runner=runner,
                    tail=self._verify_tail,
                    budget=self.config.tree_budget,
                    max_depth=self.config.max_depth,
                    pool=self._movable_pool,
                    capture=capture,
                    kept=self._fused_kv_helper,
                )
        finally:
            self._fused_kv_helper = original
        if self.ps.tp_rank == 0:
            logger.info("DDTREE: what follows the target's choices runs from one CUDA graph.")

    def _target_graphs(self) -> Any:
        return self.target_worker.model_runner.decode_cuda_graph_runner

    def _commits_on_device(self) -> bool:
        """Whether a commit is made of this package's kernels alone, so that a graph may hold it."""
        return (
            self._round.on_device
            and not self.config.shadow_linear
            and not self._need_mamba_verify_commit
            and self._movable_pool is not None
            and not is_simulating()
        )

    # --- What DFLASH's worker asks of a subclass where nothing runs (an idle batch).

    def _validate_phase1_sampling_support(self, batch: ScheduleBatch) -> None:
        """Nothing to warn of: every node is sampled on every device."""

    def _make_next_draft_input_decode(
        self, *, bonus_tokens: torch.Tensor, new_seq_lens: torch.Tensor
    ) -> DDTreeDraftInput:
        return self._next_draft_input(bonus_tokens, new_seq_lens)

    def _next_draft_input(self, bonus_tokens: torch.Tensor, seq_lens: torch.Tensor) -> DDTreeDraftInput:
        bs = seq_lens.shape[0]
        return DDTreeDraftInput(
            topk_p=torch.empty((bs, 0), dtype=torch.float32, device=self.device),
            topk_index=torch.empty((bs, 0), dtype=torch.int64, device=self.device),
            bonus_tokens=bonus_tokens.to(torch.int64),
            new_seq_lens=seq_lens.to(torch.int64),
            hidden_states=torch.empty((bs, 0), dtype=torch.float16, device=self.device),
        )

    # --- Weight updates name the target's weights; the drafter keeps its own.

    def update_weights_from_disk(self, recv_req: Any) -> tuple[bool, str]:
        return True, "The target is updated, the drafter keeps its weights."

    def update_weights_from_ipc(self, recv_req: Any) -> tuple[bool, str]:
        return True, "The target is updated, the drafter keeps its weights."

    # --- A round.

    def forward_batch_generation(
        self, batch: ScheduleBatch, on_publish: Any = None, grammar_barrier: Any = None
    ) -> GenerationBatchResult:
        """A prefill, idle as DFLASH, or one round: draft, build, verify, walk, commit.

        Under overlap scheduling the host knows neither the committed lengths nor the bonus tokens of the batch.

        Returns:
            ``next_token_ids`` int64 [bs * N], of each request's N the first ``accept_lens`` count: the accepted
            drafts and the bonus token. ``speculative_num_draft_tokens`` is this N; a packed round's is what a path
            can hold.
        """
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch or batch.forward_mode.is_idle():
            if self._auto is not None:
                self._auto.interrupt()
            if batch.forward_mode.is_idle():
                return super().forward_batch_generation(batch, on_publish, grammar_barrier)
            return self._prefill(batch, on_publish)

        # Made on the scheduler's stream, read on this one.
        bonus_tokens = batch.spec_info.bonus_tokens
        record_stream_each((batch.seq_lens, bonus_tokens), self._stream())
        self._renew_commits()
        shape = self._shape_of_round(batch)
        if isinstance(shape, Uniform):
            return self._verify_uniform(batch, bonus_tokens, shape.nodes, on_publish, grammar_barrier)
        if shape == "plain":
            tree = self._plain_tree(bonus_tokens, batch.seq_lens)
            return self._verify_packed(
                batch, tree, self._total_of_roots(len(bonus_tokens)), on_publish, grammar_barrier
            )
        ids, logprobs = self._draft(batch, bonus_tokens, self._width_of_round())
        tree, shadow = self._build(bonus_tokens, ids, logprobs, batch.seq_lens)
        if shape is not None:
            return self._verify_packed(batch, tree, shape, on_publish, grammar_barrier)
        return self._verify(batch, tree, shadow, on_publish, grammar_barrier)

    def _prefill(self, batch: ScheduleBatch, on_publish: Any) -> GenerationBatchResult:
        """The target reads the prompts, and the drafter's KV cache takes its features of them.

        DFLASH's does the same and then waits for the device to have read the prompts, so that the next round is
        launched to an idle one.
        """
        result = self.target_worker.forward_batch_generation(batch, capture_hidden_mode=CaptureHiddenMode.FULL)
        result.new_seq_lens = batch.seq_lens
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        output = result.logits_output
        if output.hidden_states is None:
            raise RuntimeError("DDTREE: the target's prefill brought no features for the drafter.")
        # At once: the scheduler may share the prompts' slots as soon as this returns.
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=output.hidden_states,
            cache_loc=batch.out_cache_loc,
            positions=prompt_positions(batch.prefix_lens, batch.extend_lens, result.next_token_ids.device),
        )
        # Under overlap scheduling what the output holds is copied to the host.
        output.hidden_states = None
        result.next_draft_input = self._next_draft_input(result.next_token_ids, batch.seq_lens)
        return result

    def _shape_of_round(self, batch: ScheduleBatch) -> RoundShape:
        """What this round verifies, decided before anything of it runs: see `ddtree_round.RoundShape`."""
        if self._auto is None:
            return None
        context, classes = partial(self._context_tokens, batch), partial(_count_classes, batch.reqs)
        self._auto_round = self._auto.begin_round(len(batch.seq_lens), context, classes)
        if self.config.uniform:
            return Uniform(self._auto_round.nodes)
        return "plain" if self._auto_round.plain else self._auto_round.tokens

    def _width_of_round(self) -> int:
        """How many positions this round drafts, the bonus token's counted; one of the draft passes'."""
        return self.block_size if self._auto_round is None else self._auto_round.draft_width

    def _plain_tree(self, bonus_tokens: torch.Tensor, seq_lens: torch.Tensor) -> RoundTree:
        graphs = self._packed_graphs(len(bonus_tokens))
        return root_trees(bonus_tokens, seq_lens) if graphs is None else graphs.plain_tree(bonus_tokens)

    def _total_of_roots(self, bs: int) -> int:
        """Verify tokens of a plain round: one per request, or the smallest graph that holds them."""
        graphs = self._packed_graphs(bs)
        if graphs is None:
            return bs
        totals = graphs.runner.capture_num_tokens
        return totals[bisect_left(totals, bs)]

    def _packed_graphs(self, bs: int) -> PackedCommitGraphs | None:
        """What commits a packed round of ``bs`` requests from a graph, if it can."""
        graphs = self._commit_graphs
        return graphs if isinstance(graphs, PackedCommitGraphs) and bs <= graphs.largest else None

    def _renew_commits(self) -> None:
        graphs = self._commit_graphs
        if graphs is not None and (graphs.runner is None or graphs.runner is not self._target_graphs()):
            # New weights may bring new graphs; the old ones' buffers are gone.
            self._capture_commits()
        if self._uniform_of is not None and self._uniform_of() is not self._target_graphs():
            self._capture_uniform(serving=True)

    def _build(
        self, bonus_tokens: torch.Tensor, ids: torch.Tensor, logprobs: torch.Tensor, seq_lens: torch.Tensor
    ) -> tuple[RoundTree, RoundTree | None]:
        """The trees to verify, and in shadow-linear mode those that are only looked at; arguments as in `build`."""
        config = self.config
        if not config.shadow_linear:
            graphs = self._commit_graphs
            out = None if graphs is None else graphs.tree(len(bonus_tokens))
            return self._round.build(bonus_tokens, ids, logprobs, config.budget, seq_lens, out), None
        # Rank 0 of every position is what DFLASH drafts.
        chain = self._round.build(bonus_tokens, ids[..., :1], logprobs[..., :1], config.tree_budget, seq_lens)
        return chain, self._round.build(bonus_tokens, ids, logprobs, config.budget, seq_lens)

    def _stream(self) -> Any:
        return torch.get_device_module(self.device).current_stream()

    def _host_bound(self, batch: ScheduleBatch) -> torch.Tensor:
        """Committed lengths as far as the host knows them, never too small: int [bs] on the CPU."""
        if batch.seq_lens_cpu is not None:
            return batch.seq_lens_cpu
        # An attention backend that plans on the device spares the scheduler the copy: all that was reserved.
        return batch.spec_info.reserved_seq_lens_cpu

    def _context_tokens(self, batch: ScheduleBatch) -> int:
        """Committed tokens of all requests, roughly: what the host knows without waiting for the device.

        Where it does not know the lengths: all that was reserved, less the two rounds' slots ahead. The round before,
        which may still run, is not counted, and pages are counted whole.
        """
        if batch.seq_lens_cpu is not None:
            return int(batch.seq_lens_cpu.sum())
        ahead = 2 * self.config.slots_per_round
        bs = len(batch.seq_lens)
        return max(batch.spec_info.reserved_seq_lens_sum - ahead * bs, bs)

    def _draft(self, batch: ScheduleBatch, bonus_tokens: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass of the drafter over [bonus, mask x (width - 1)]; returns as `DraftPass.run`."""
        return self._draft_passes[width].run(batch, bonus_tokens, self._host_bound(batch))

    def _candidates(self, hidden_states: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of an eager pass, see `DraftPass`."""
        return candidates(
            hidden_states,
            self.target_worker.model_runner.model.lm_head,
            width,
            self.config.topk,
            get_tp_group(),
            on_device=self._round.on_device,
        )

    def _verify_mask(self, batch: ScheduleBatch, tree: RoundTree) -> torch.Tensor | None:
        """The tree's mask in the form the attention backend takes; None where it reads bits, or a chain."""
        if self.config.shadow_linear or reads_ancestor_bits(self.model_runner.attn_backend):
            return None
        if torch.device(self.device).type == "cpu":
            return self._round.tree_mask(tree)
        bs, nodes = tree.tree.tokens.shape
        # The bound counts reserved slots too, which may lie behind the context length.
        total = nodes * int(self._host_bound(batch).sum()) + bs * nodes * nodes
        out = torch.empty(total, dtype=torch.bool, device=self.device)
        return self._round.full_mask(tree, batch.seq_lens, out)

    def _verify_input(self, batch: ScheduleBatch, tree: RoundTree) -> DDTreeVerifyInput:
        nodes = tree.tree
        return DDTreeVerifyInput(
            draft_token=nodes.tokens.reshape(-1),
            custom_mask=self._verify_mask(batch, tree),
            positions=tree.positions.reshape(-1),
            # Read by SGLang's own tree sampling alone.
            retrieve_index=None,
            retrieve_next_token=nodes.first_child,
            retrieve_next_sibling=nodes.next_sibling,
            retrieve_cum_len=None,
            spec_steps=self.config.max_depth,
            topk=1 if self.config.shadow_linear else 2,
            draft_token_num=nodes.tokens.shape[1],
            capture_hidden_mode=CaptureHiddenMode.FULL,
            seq_lens_sum=None,
            seq_lens_cpu=None,
            ancestor_bits=None if self.config.shadow_linear else tree.ancestor_bits,
        )

    def _verify_uniform(
        self, batch: ScheduleBatch, bonus_tokens: torch.Tensor, nodes: int, on_publish: Any, grammar_barrier: Any
    ) -> DDTreeBatchResult:
        """A round whose requests all verify as many nodes, by the target's backend and graphs for so many.

        Nothing is packed, so that recurrent layers can follow: every request's tree is built for its ``nodes`` best.
        """
        told = None
        if nodes == 1:
            tree = root_trees(bonus_tokens, batch.seq_lens)
        else:
            ids, logprobs = self._draft(batch, bonus_tokens, self._width_of_round())
            tree = self._round.build(bonus_tokens, ids, logprobs, nodes - 1, batch.seq_lens)
            if self._auto_round is not None and self._auto_round.fresh:
                # What is told is of all nodes that a wider round would verify.
                whole = tree
                if nodes < self.config.verify_width:
                    whole = self._round.build(bonus_tokens, ids, logprobs, self.config.budget, batch.seq_lens)
                worth, expected = node_worth(whole.tree, nodes)
                told = {"worth": worth, "expected": expected}
        captured = self._uniform.get(nodes)
        in_place: AbstractContextManager[None] = nullcontext() if captured is None else captured.in_place()
        with in_place:
            return self._verify(batch, tree, None, on_publish, grammar_barrier, told)

    def _verify(
        self,
        batch: ScheduleBatch,
        tree: RoundTree,
        shadow: RoundTree | None,
        on_publish: Any,
        grammar_barrier: Any,
        told: dict[str, torch.Tensor] | None = None,
    ) -> DDTreeBatchResult:
        """Verify the trees in one target forward, walk them and commit. Mutates ``batch`` and both KV pools.

        The steps are those of SGLang's ``run_eagle_verify``; its sampling is replaced, since that one ignores
        min-p, is greedy on the CPU and draws among tied maxima for a greedy request beside sampled ones.

        ``told``: as in `_result`.
        """
        verify_input = self._verify_input(batch, tree)
        batch.spec_info = verify_input
        # The batch drops its references while kernels on this stream still read what they refer to.
        record_stream_for_v2_verify(batch, verify_input, self._stream())
        forward_batch, can_run_cuda_graph = eagle_prepare_for_verify(
            verify_input, self.model_runner.req_to_token_pool, batch, self.target_worker
        )
        record_stream_each((batch.input_ids, batch.out_cache_loc), self._stream())
        graphs, bs = self._commit_graphs, len(batch.seq_lens)
        if isinstance(graphs, CommitGraphs) and can_run_cuda_graph and graphs.tree(bs) is tree:
            likeliest, replay = graphs.choices(bs), partial(graphs.replay, bs)
            logits_output, choices = self._choose(batch, forward_batch, tree.tree, None, grammar_barrier, likeliest)
            done = self._commit_in_graph(batch, logits_output, choices, likeliest, replay, on_publish)
            return self._result(logits_output, True, done, done, done.round_stats, (forward_batch, tree))
        logits_output, choices = self._choose(batch, forward_batch, tree.tree, None, grammar_barrier)
        slots = batch.out_cache_loc.view(choices.shape)
        max_depth = min(self.config.max_depth, choices.shape[1] - 1)
        if is_simulating():
            choices, walk = simulate_walk(choices, max_depth)
            plan = plan_commit(walk, choices, batch.seq_lens, slots)
        else:
            walk, plan = self._round.commit(tree, choices, max_depth, batch.seq_lens, slots)
        if batch.return_logprob:
            compute_spec_v2_logprobs(batch, logits_output, choices.view(-1), plan.rows, plan.rows.shape[1] - 1)
        self._commit(batch, logits_output, walk, plan, on_publish)
        round_stats = self._round.stats(tree.tree, walk) if shadow is None else shadow_stats(shadow.tree, walk)
        kept = (forward_batch, tree)
        return self._result(logits_output, can_run_cuda_graph, walk, plan, round_stats, kept, told)

    def _commit_in_graph(
        self,
        batch: ScheduleBatch,
        logits_output: Any,
        choices: torch.Tensor,
        likeliest: torch.Tensor,
        replay: Callable[[], CommittedRound],
        on_publish: Any,
    ) -> CommittedRound:
        """All behind the choices by one replay, which reads them where the verify graph leaves the ``likeliest``."""
        if choices is not likeliest:
            likeliest.copy_(choices)
        done = replay()
        if batch.return_logprob:
            compute_spec_v2_logprobs(batch, logits_output, likeliest.view(-1), done.rows, done.rows.shape[1] - 1)
        # Not needed on the host, and large.
        logits_output.hidden_states = None
        if on_publish is not None:
            on_publish(done.new_seq_lens)
        return done

    def _verify_packed(
        self, batch: ScheduleBatch, tree: RoundTree, total: int, on_publish: Any, grammar_barrier: Any
    ) -> DDTreeBatchResult:
        """Verify the ``total`` likeliest nodes of all trees in one target forward, without padding between requests.

        Else as `_verify`; from graphs where one of this total was captured.
        """
        self._assert_packable()
        bs, table = len(batch.seq_lens), self.model_runner.req_to_token_pool.req_to_token
        graphs = self._packed_graphs(bs)
        if graphs is not None and (graphs.tree(bs) is not tree or not graphs.runner.holds(total, bs)):
            graphs = None
        steps = self._round if graphs is None else graphs
        packed = steps.pack(tree, total, batch.seq_lens, batch.req_pool_indices, table)
        # What is not verified is no node for grammar and statistics either; a graph counts by itself.
        cut = packed.cut() if graphs is None or batch.has_grammar else packed.tree
        nodes = packed.nodes
        verify_input = DDTreeVerifyInput(
            draft_token=nodes.tokens,
            custom_mask=None,
            positions=nodes.positions,
            retrieve_index=None,
            retrieve_next_token=None,
            retrieve_next_sibling=None,
            retrieve_cum_len=None,
            spec_steps=self.config.max_depth,
            topk=2,
            draft_token_num=cut.tokens.shape[1],
            capture_hidden_mode=CaptureHiddenMode.FULL,
            seq_lens_sum=None,
            seq_lens_cpu=None,
            ancestor_bits=nodes.ancestor_bits,
            qo_indptr=packed.share.qo_indptr,
            depths=nodes.depths,
        )
        verify_input.ragged_verify_layout = ragged_layout(total)
        record_stream_for_v2_verify(batch, verify_input, self._stream())
        forward_batch, in_graph = verify_input.prepare_packed(batch, nodes.slots, self.target_worker.model_runner)
        if graphs is not None and in_graph:
            likeliest, replay_packed = graphs.choices(total), partial(graphs.replay, bs, total)
            logits_output, choices = self._choose(batch, forward_batch, cut, packed, grammar_barrier, likeliest)
            done = self._commit_in_graph(batch, logits_output, choices, likeliest, replay_packed, on_publish)
            told = {"histogram": done.histogram, "expected": done.expected}
            return self._result(logits_output, True, done, done, done.round_stats, (forward_batch, tree), told)
        logits_output, choices = self._choose(batch, forward_batch, cut, packed, grammar_barrier)
        choices = choices.view(-1)
        max_depth = min(self.config.max_depth, cut.tokens.shape[1] - 1)
        if is_simulating():
            choices, walk = simulate_packed(self._round, packed, max_depth, batch.seq_lens)
        else:
            walk = self._round.commit_packed(packed, choices, max_depth, batch.seq_lens)
        if batch.return_logprob:
            compute_spec_v2_logprobs(batch, logits_output, choices, walk.rows, walk.rows.shape[1] - 1)
        self._commit(batch, logits_output, walk, walk, on_publish)
        # The graphs' own share is written by the next round, beside the copy to the host.
        share = {"histogram": packed.share.histogram, "expected": packed.share.expected}
        told = {name: x if graphs is None else x.clone() for name, x in share.items()}
        kept = (forward_batch, tree, packed, cut)
        return self._result(logits_output, in_graph, walk, walk, self._round.stats(cut, walk), kept, told)

    def _assert_packable(self) -> None:
        config = self.config
        assert not config.shadow_linear and config.verify_width <= MAX_NODES, f"{config} has no packed rounds"
        assert not self._need_mamba_verify_commit, "recurrent states have no packed rounds"
        backend = self.model_runner.attn_backend
        on_cpu = torch.device(self.device).type == "cpu"
        assert on_cpu or reads_ancestor_bits(backend), f"{type(backend).__name__} knows no packed rounds"

    def _choose(
        self,
        batch: ScheduleBatch,
        forward_batch: ForwardBatch,
        tree: DraftTree,
        packed: PackedTree | None,
        grammar_barrier: Any,
        likeliest: torch.Tensor | None = None,
    ) -> tuple[Any, torch.Tensor]:
        """The target's forward and its choice at every node.

        Args:
            batch: the verify batch.
            forward_batch: of it.
            tree: the trees, links to verified nodes only.
            packed: of a packed round.
            grammar_barrier: as of `forward_batch_generation`.
            likeliest: int64 [bs, N], where the forward itself leaves the likeliest tokens.
        Returns:
            SGLang's output of the forward, and int64 [bs, N], packed [T, 1]; ``likeliest`` itself where that is all.
        """
        grammar_tree = None
        if batch.has_grammar:
            # Copies to the host: started before the forward, so that it overlaps.
            grammar_tree = GrammarTree.from_device(tree.first_child, tree.next_sibling, tree.tokens)
        output = self.target_worker.forward_batch_generation(batch=None, forward_batch=forward_batch, is_verify=True)
        logits_output = output.logits_output
        grammar_mask = None
        if grammar_tree is not None:
            grammar_mask = build_grammar_vocab_mask(
                reqs=batch.reqs,
                tree=grammar_tree,
                sampling_info=batch.sampling_info,
                device=logits_output.next_token_logits.device,
                barrier=grammar_barrier,
            )
        if grammar_mask is not None and packed is not None:
            rows = packed.dense_rows()
            grammar_mask = grammar_mask._replace(vocab_mask=grammar_mask.vocab_mask.index_select(0, rows))
        if likeliest is not None and grammar_mask is None and takes_likeliest(batch.sampling_info):
            return logits_output, likeliest
        choices = choose_tokens(
            logits_output=logits_output,
            sampling_info=batch.sampling_info,
            positions=forward_batch.spec_info.positions,
            num_nodes=tree.tokens.shape[1] if packed is None else 1,
            owners=None if packed is None else packed.row_owners(),
            sampler=self.model_runner.sampler,
            grammar_mask=grammar_mask,
            tp_group=get_tp_group(),
            keep_logits=batch.return_logprob,
        )
        return logits_output, choices

    def _result(
        self,
        logits_output: Any,
        can_run_cuda_graph: bool,
        walk: WalkResult | PackedWalk | Committed,
        plan: CommitPlan | PackedWalk | Committed,
        round_stats: torch.Tensor,
        kept: tuple[Any, ...],
        told: dict[str, torch.Tensor] | None = None,
    ) -> DDTreeBatchResult:
        """``told``: fields of the result that say what the round's drafts were worth."""
        auto_round, self._auto_round = self._auto_round, None
        if self._auto is not None:
            self._auto.launched()
        if auto_round is None or auto_round.plain or not auto_round.fresh:
            told = None
        return DDTreeBatchResult(
            logits_output=logits_output,
            next_token_ids=plan.next_tokens.reshape(-1),
            accept_lens=plan.accept_lens,
            can_run_cuda_graph=can_run_cuda_graph,
            next_draft_input=self._next_draft_input(walk.bonus, plan.new_seq_lens),
            speculative_num_draft_tokens=plan.next_tokens.numel() // plan.accept_lens.numel(),
            new_seq_lens=plan.new_seq_lens,
            # Under overlap the batch moves on while this round still runs.
            extra_keep_alive_refs=[*kept, walk, plan],
            round_stats=round_stats,
            auto_round=auto_round,
            **(told or {}),
        )

    def _commit(
        self,
        batch: ScheduleBatch,
        logits_output: Any,
        walk: WalkResult | PackedWalk,
        plan: CommitPlan | PackedWalk,
        on_publish: Any,
    ) -> None:
        """Make the accepted path the request's next tokens: KV to the front, hidden states to the drafter.

        Source and target slots come from the round's own ``out_cache_loc``. SGLang's helper reads ``req_to_token``
        again, which the overlap scheduler may be rewriting by then for the next round.
        """
        if self._need_mamba_verify_commit:
            nodes = batch.out_cache_loc.shape[0] // plan.accept_lens.shape[0]
            accepted = torch.where(walk.accept_index >= 0, plan.rows, -1).to(torch.int32)
            commit_mamba_states_after_verify(self.target_worker, batch, plan.accept_lens, accepted, nodes)
        hidden = logits_output.hidden_states[plan.rows.view(-1)]
        # Not needed on the host, and large.
        logits_output.hidden_states = None
        if not self.config.shadow_linear:
            self._move_kv(plan)
        if on_publish is not None:
            on_publish(plan.new_seq_lens)
        self._feed_drafter(hidden, plan)

    @cached_property
    def _movable_pool(self) -> Any:
        """The target's pool where the round's own kernel may move what was accepted, else None."""
        if not self._round.on_device:
            return None
        return movable(self.model_runner.token_to_kv_pool_allocator.get_kvcache())

    def _move_kv(self, plan: CommitPlan | PackedWalk) -> None:
        """The accepted nodes' keys and values to the front of the round's slots, in every layer of the target."""
        if self._movable_pool is not None:
            move_accepted(self._movable_pool, plan.kv_to, plan.kv_from, plan.accept_lens)
            return
        kv_cache = self.model_runner.token_to_kv_pool_allocator.get_kvcache()
        kv_cache.move_kv_cache(plan.kv_to.view(-1), plan.kv_from.view(-1))

    def _feed_drafter(self, hidden: torch.Tensor, plan: CommitPlan | PackedWalk) -> None:
        """Write the drafter's keys and values of the committed tokens, which share the target's slots.

        Args:
            hidden: [bs * P, features] along the walked paths.
            plan: of which the first ``accept_lens`` places of a row count.
        """
        if hidden.device.type == "cpu":
            # SGLang's writer of a valid prefix is a Triton kernel: pack the rows and write them plainly.
            valid = torch.arange(plan.kv_to.shape[1]) < plan.accept_lens[:, None]
            self._append_target_hidden_to_draft_kv_by_loc(
                target_hidden=hidden[valid.view(-1)], cache_loc=plan.kv_to[valid], positions=plan.positions[valid]
            )
            return
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=hidden,
            cache_loc=plan.kv_to.view(-1),
            positions=plan.positions.view(-1),
            cache_loc_2d=plan.kv_to,
            commit_lens=plan.accept_lens,
        )

    def _feed_rows(self, hidden: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        """The same for all rows of a packed verify, [T, features]; ``slots`` of rows that count for nothing are 0."""
        self._append_target_hidden_to_draft_kv_by_loc(target_hidden=hidden, cache_loc=slots, positions=positions)


def _count_classes(reqs: Any) -> Counter[str]:
    return Counter(request_classes(reqs))


def _recorded_event() -> Any:
    """An event of the current stream, as it is now."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _first_agrees(group: Any, own: bool) -> bool:
    """The first rank's answer, on every rank of a tensor-parallel group."""
    return bool(_first_ranks(group, (int(own),))[0])


def _first_ranks(group: Any, own: tuple[int, ...]) -> tuple[int, ...]:
    """The first rank's numbers, on every rank of a tensor-parallel group."""
    numbers = torch.tensor(own, dtype=torch.int64)
    torch.distributed.broadcast(numbers, src=group.ranks[0], group=group.cpu_group)
    return tuple(numbers.tolist())
