"""DDTreeWorker: draft a block, build a tree from it, verify the tree in one target forward, commit a path.

DDTree (Diffusion Draft Tree, arXiv 2604.12989) on SGLang's DFLASH worker: prefill, the drafter and the
drafter's KV cache are DFLASH's; the draft tail, verify and commit are a tree's.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs_func
from sglang.srt.distributed import get_tp_group
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.speculative.ddtree_sampling import choose_tokens
from sglang.srt.speculative.ddtree_simulation import is_simulating, simulate_walk
from sglang.srt.speculative.ddtree_topk import local_vocabulary, topk_logprobs
from sglang.srt.speculative.ddtree_utils import (
    DraftTree,
    WalkResult,
    build_trees,
    full_mask,
    global_links,
    qlen_only_mask,
    tree_positions,
    walk_trees,
)
from sglang.srt.speculative.dflash_info import DDTreeDraftInput, DDTreeVerifyInput
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from sglang.srt.speculative.eagle_utils import eagle_prepare_for_verify
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_utils import (
    GrammarTree,
    build_grammar_vocab_mask,
    commit_mamba_states_after_verify,
    move_accept_tokens_to_target_kvcache,
)
from sglang_ddtree.flags import config_of
from sglang_ddtree.requirements import check_loaded_target


class DDTreeWorker(DFlashWorkerV2):
    """Speculative worker of ``--speculative-algorithm DDTREE``.

    D is the drafter's block size, N the verify width (budget + 1), bs the running requests. In shadow-linear
    mode the tree is DFLASH's chain: N = D, one candidate per position, causal verify.
    """

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
        # The drafter embeds its block itself: SGLang's runner would round embeddings handed to it to bfloat16.
        self.draft_model.forward_embed = self._embed_block

    def _embed_block(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The target's embeddings [tokens, hidden], in the drafter's dtype."""
        embed = self.target_worker.model_runner.model.get_input_embeddings()
        return embed(input_ids).to(self.draft_model.fc.weight.dtype)

    # --- What DFLASH's prefill asks of a subclass.

    def _validate_phase1_sampling_support(self, batch: ScheduleBatch) -> None:
        """Nothing to warn of: every node is sampled on every device."""

    def _make_next_draft_input_prefill(self, *, bonus_tokens: torch.Tensor, seq_lens: torch.Tensor) -> DDTreeDraftInput:
        return self._next_draft_input(bonus_tokens, seq_lens)

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
        """Prefill or idle as DFLASH; else one round: draft, build, verify, walk, commit.

        Returns:
            ``next_token_ids`` int64 [bs * N], of each request's N the first ``accept_lens`` count: the accepted
            drafts and the bonus token.
        """
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch or batch.forward_mode.is_idle():
            return super().forward_batch_generation(batch, on_publish, grammar_barrier)

        bonus_tokens = batch.spec_info.bonus_tokens
        candidate_ids, candidate_logprobs = self._draft(batch, bonus_tokens)
        tree = build_trees(bonus_tokens, candidate_ids, candidate_logprobs, self.config.tree_budget, validate=False)
        return self._verify(batch, tree, on_publish, grammar_barrier)

    def _draft(self, batch: ScheduleBatch, bonus_tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass of the drafter over [bonus, mask x (D - 1)].

        Returns:
            ids int64 [bs, D - 1, K] and log-probabilities float32 [bs, D - 1, K] for block positions 1..D-1.
        """
        bs, width = batch.seq_lens.shape[0], self.block_size
        target = self.target_worker.model_runner.model
        block = torch.full((bs, width), self._mask_token_id, dtype=torch.int64, device=self.device)
        block[:, 0] = bonus_tokens
        seq_lens = batch.seq_lens
        slots = assign_extend_cache_locs_func(
            req_pool_indices=batch.req_pool_indices,
            req_to_token=self.model_runner.req_to_token_pool.req_to_token,
            start_offset=seq_lens,
            end_offset=seq_lens + width,
            batch_size=bs,
            draft_token_num=width,
            device=self.device,
        )
        # An upper bound per row for backends that plan on the host.
        seq_lens_cpu = batch.seq_lens_cpu.to(torch.int32) + width
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=bs,
            input_ids=block.view(-1),
            req_pool_indices=batch.req_pool_indices,
            seq_lens=seq_lens,
            out_cache_loc=slots,
            seq_lens_sum=int(seq_lens_cpu.sum()),
            seq_lens_cpu=seq_lens_cpu,
            positions=(seq_lens[:, None] + self._block_pos_offsets).view(-1),
            spec_algorithm=SpeculativeAlgorithm.DFLASH,
            spec_info=self._draft_block_spec_info,
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )
        with torch.inference_mode():
            hidden = self.draft_model_runner.forward(forward_batch).logits_output.hidden_states
            drafted = hidden.view(bs, width, -1)[:, 1:].reshape(bs * (width - 1), -1)
            ids, logprobs = topk_logprobs(drafted, target.lm_head, self.config.topk, get_tp_group())
        return ids.view(bs, width - 1, -1), logprobs.view(bs, width - 1, -1)

    def _verify_input(self, batch: ScheduleBatch, tree: DraftTree) -> DDTreeVerifyInput:
        if self.config.shadow_linear:
            mask = None
        elif torch.device(self.device).type == "cpu":
            mask = qlen_only_mask(tree.visible)
        else:
            bs, nodes = tree.tokens.shape
            mask = full_mask(
                tree.visible, batch.seq_lens, total=nodes * int(batch.seq_lens_cpu.sum()) + bs * nodes * nodes
            )
        return DDTreeVerifyInput(
            draft_token=tree.tokens.reshape(-1),
            custom_mask=mask,
            positions=tree_positions(tree.depths, batch.seq_lens).reshape(-1),
            retrieve_index=global_links(tree.first_child, tree.next_sibling),
            retrieve_next_token=tree.first_child,
            retrieve_next_sibling=tree.next_sibling,
            retrieve_cum_len=None,
            spec_steps=self.config.max_depth,
            topk=1 if self.config.shadow_linear else 2,
            draft_token_num=self.config.verify_width,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            seq_lens_sum=None,
            seq_lens_cpu=None,
        )

    def _verify(
        self, batch: ScheduleBatch, tree: DraftTree, on_publish: Any, grammar_barrier: Any
    ) -> GenerationBatchResult:
        """Verify the trees in one target forward, walk them and commit. Mutates ``batch`` and both KV pools.

        The steps are those of SGLang's ``run_eagle_verify``; its sampling is replaced, since that one ignores
        min-p, is greedy on the CPU and draws among tied maxima for a greedy request beside sampled ones.
        """
        target_worker = self.target_worker
        verify_input = self._verify_input(batch, tree)
        batch.spec_info = verify_input
        forward_batch, can_run_cuda_graph = eagle_prepare_for_verify(
            verify_input, self.model_runner.req_to_token_pool, batch, target_worker
        )
        grammar_tree = None
        if batch.has_grammar:
            # Copies to the host: started before the forward, so that it overlaps.
            grammar_tree = GrammarTree.from_device(tree.first_child, tree.next_sibling, tree.tokens)
        output = target_worker.forward_batch_generation(batch=None, forward_batch=forward_batch, is_verify=True)
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
        choices = choose_tokens(
            logits_output=logits_output,
            sampling_info=batch.sampling_info,
            positions=verify_input.positions,
            num_nodes=verify_input.draft_token_num,
            sampler=self.model_runner.sampler,
            grammar_mask=grammar_mask,
            tp_group=get_tp_group(),
        )
        walk = walk_trees(tree.tokens, tree.parents, choices, self.config.max_depth)
        if is_simulating():
            choices, walk = simulate_walk(choices, self.config.max_depth)
        return self._commit(batch, logits_output, choices, walk, on_publish, can_run_cuda_graph)

    def _commit(
        self,
        batch: ScheduleBatch,
        logits_output: Any,
        choices: torch.Tensor,
        walk: WalkResult,
        on_publish: Any,
        can_run_cuda_graph: bool,
    ) -> GenerationBatchResult:
        """Make the accepted path the request's next tokens: KV to the front, hidden states to the drafter."""
        bs, nodes = choices.shape
        accept_lens = (walk.num_accepted_drafts + 1).to(torch.int32)
        new_seq_lens = batch.seq_lens + accept_lens
        local = walk.accept_index.to(torch.int32)
        first_node = torch.arange(0, bs * nodes, nodes, dtype=torch.int32, device=local.device)[:, None]
        accept_index = torch.where(local >= 0, local + first_node, local)

        commit_mamba_states_after_verify(self.target_worker, batch, accept_lens, accept_index, nodes)
        path = walk.accept_index.clamp(min=0)
        # The choice at an accepted node is the next accepted token, at the last one it is the bonus.
        next_tokens = torch.nn.functional.pad(choices.gather(1, path), (0, nodes - path.shape[1]))
        hidden = logits_output.hidden_states.view(bs, nodes, -1)
        hidden = hidden.gather(1, path[:, :, None].expand(-1, -1, hidden.shape[-1]))
        if not self.config.shadow_linear:
            move_accept_tokens_to_target_kvcache(
                batch, accept_index, walk.num_accepted_drafts, self.model_runner.token_to_kv_pool_allocator
            )
        if on_publish is not None:
            on_publish(new_seq_lens)
        self._feed_drafter(batch, hidden, accept_lens)
        # Not needed on the host, and large.
        logits_output.hidden_states = None
        return GenerationBatchResult(
            logits_output=logits_output,
            next_token_ids=next_tokens.reshape(-1),
            accept_lens=accept_lens,
            can_run_cuda_graph=can_run_cuda_graph,
            next_draft_input=self._next_draft_input(walk.bonus, new_seq_lens),
            speculative_num_draft_tokens=nodes,
            new_seq_lens=new_seq_lens,
        )

    def _feed_drafter(self, batch: ScheduleBatch, hidden: torch.Tensor, accept_lens: torch.Tensor) -> None:
        """Write the drafter's keys and values of the committed tokens, which share the target's slots.

        Args:
            hidden: [bs, max_depth + 1, features] along the walked path; the first ``accept_lens`` of a row count.
            accept_lens: int32 [bs].
        """
        bs, width, features = hidden.shape
        offsets = torch.arange(width, device=hidden.device)
        positions = batch.seq_lens[:, None] + offsets
        slots = batch.out_cache_loc.view(bs, -1)[:, :width].contiguous()
        if hidden.device.type == "cpu":
            # SGLang's writer of a valid prefix is a Triton kernel: pack the rows and write them plainly.
            valid = offsets < accept_lens[:, None]
            self._append_target_hidden_to_draft_kv_by_loc(
                target_hidden=hidden[valid], cache_loc=slots[valid], positions=positions[valid]
            )
            return
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=hidden.reshape(-1, features),
            cache_loc=slots.view(-1),
            positions=positions.reshape(-1),
            cache_loc_2d=slots,
            commit_lens=accept_lens,
        )
