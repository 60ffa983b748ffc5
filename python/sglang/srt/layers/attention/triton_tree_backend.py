"""SGLang's Triton backend with a verify that reads ancestor bits instead of a dense mask."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.triton_backend import ForwardMetadata, TritonAttnBackend
from sglang.srt.layers.attention.triton_tree_mask import (
    ALIKE,
    SplitPlan,
    Tiles,
    Weights,
    allocate_plan,
    allocate_scratch,
    choose_extra_splits,
    choose_tiles,
    plan_splits,
    scratch_numel,
    shared_memory_of,
    tree_attention,
    weigh,
)

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

_WORD_BITS = 64
# Nodes of a request that packed rounds of many requests mostly have at most, and the tokens of a round up to which a
# second launch per layer for such requests costs more than it spares.
_FEW_NODES, _FEW_TOKENS = 16, 64


@dataclass(eq=False)
class TreeRound:
    """What one verify reads beside SGLang's metadata, the same for every layer.

    Attributes:
        ancestor_bits: int64 [bs, N, W]; packed: [T, W].
        depths: int64 [bs, N], packed [T], or None where no layer has a sliding window.
        plan: how the prefixes are split, of layers without a window.
        window_plan: of layers with one, or None.
        scratch: float32, shared by all layers.
        is_block: a drafter's block, in which every node sees all others, rather than a tree.
        is_packed: requests of different numbers of nodes lie one behind the other, and a tail may follow them.
        small_tiles: of requests of few nodes, or None.
    """

    ancestor_bits: torch.Tensor
    depths: torch.Tensor | None
    plan: SplitPlan
    window_plan: SplitPlan | None
    scratch: torch.Tensor
    is_block: bool = False
    is_packed: bool = False
    small_tiles: Tiles | None = None

    def head(self, bs: int) -> TreeRound:
        """Views for a smaller batch in buffers made for a larger one."""
        return TreeRound(
            self.ancestor_bits[:bs],
            None if self.depths is None else self.depths[:bs],
            self.plan.head(bs),
            None if self.window_plan is None else self.window_plan.head(bs),
            self.scratch,
            self.is_block,
        )


@dataclass
class TreeForwardMetadata(ForwardMetadata):
    """SGLang's metadata of a forward, and its tree: whoever keeps or swaps one does it with both."""

    tree: TreeRound | None = None


class TritonTreeMaskAttnBackend(TritonAttnBackend):
    """SGLang's ``triton`` backend; TARGET_VERIFY of a ``spec_info`` with ``ancestor_bits`` uses the tree kernel.

    A drafter's block uses it as well, in layers where every token of the block sees all others: SGLang's kernel does
    not split its context either.

    Read from ``spec_info``:
        ancestor_bits: int64 [bs, N, W], contiguous; see `triton_tree_mask.tree_attention`. None or absent: the
            parent's verify, causal without a ``custom_mask``.
        depths: int64 [bs, N]; read where the model has a sliding window. None: positions - seq_lens.
        qo_indptr: int32 [bs + 1]: the round is packed. The bits are then [T, W] and the depths [T], which must be
            given; request b's nodes are the rows from qo_indptr[b] to [b + 1], at most ``draft_token_num`` of them, and
            rows behind the last one get zeros. None or absent: N rows each.

    A ``custom_mask`` beside the bits is not read, and the parent's buffer for one is never allocated; a mask alone
    is served eagerly as the parent does, but refused by a CUDA graph.

    A CUDA graph captured with bits serves every later round: with its bits, or without any causally. One captured
    without refuses bits, since it would ignore them. A graph captured packed serves packed rounds of its T alone, of at
    most as many requests.
    """

    # Read by SGLang's graph runner, which keys its graphs by tokens then.
    supports_ragged_verify_graph: bool = True

    # Chains take the tree kernel too: a chain's bits are made up where a target's verify brings neither bits nor mask.
    tree_for_chains: bool = False

    # Set by the parent.
    extend_attention_fwd: Any
    forward_metadata: Any
    is_draft_runner: bool

    def __init__(
        self, model_runner: ModelRunner, skip_prefill: bool = False, kv_indptr_buf: torch.Tensor | None = None
    ) -> None:
        super().__init__(model_runner, skip_prefill, kv_indptr_buf)
        self._head_dim = int(model_runner.model_config.head_dim)
        self._dtype = model_runner.dtype
        # A drafter's windowed layers never reach the tree kernel.
        self._has_window = not self.is_draft_runner and (self.sliding_window_size or 0) > 0
        # A drafter's, by its block's size.
        self._block_bits: dict[int, torch.Tensor] = {}
        self._graph_max_bs = 0
        self._graph_round: TreeRound | None = None
        # Batch sizes whose graph holds the tree kernel.
        self._graphs_with_tree: set[int] = set()
        # Captured packed rounds by their T.
        self._packed_rounds: dict[int, TreeRound] = {}
        # int32 [largest batch + 1] by tokens per request, where a uniform round's requests begin.
        self._indptr_of_width: dict[int, torch.Tensor] = {}
        # The seam: the parent writes the cache and gathers a layer's arguments, then calls this attribute.
        self._extend_attention = self.extend_attention_fwd
        self.extend_attention_fwd = torch.compiler.disable(self._extend_or_tree)

    # --- Once per round.

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        if not forward_batch.forward_mode.is_target_verify():
            return
        bs, spec_info = forward_batch.batch_size, forward_batch.spec_info
        bits = self._bits(spec_info, bs)
        if bits is None:
            return
        self._check_servable()
        metadata, packed = dict(vars(self.forward_metadata)), _is_packed(spec_info)
        if packed:
            # The parent knows one number of nodes for all requests.
            metadata["qo_indptr"] = spec_info.qo_indptr
            nodes, small_tiles = _most_nodes(spec_info), self._small_tiles(bits.shape[0])
            extra, weights = self._splits(nodes, small_tiles)
        else:
            nodes, small_tiles, weights = bits.shape[1], None, ALIKE
            extra = self._extra_splits(nodes)
        qo_indptr, window_plan = metadata["qo_indptr"], None
        if self._has_window:
            window_plan = plan_splits(qo_indptr, metadata["window_kv_indptr"], extra, weights=weights)
        tree = TreeRound(
            bits.contiguous(),
            self._depths(spec_info, forward_batch.seq_lens, bits),
            plan_splits(qo_indptr, metadata["kv_indptr"], extra, weights=weights),
            window_plan,
            allocate_scratch(bs, extra, nodes, self.num_head, self._widest_value(), self.device),
            self._drafts(),
            packed,
            small_tiles,
        )
        self.forward_metadata = TreeForwardMetadata(**metadata, tree=tree)

    def init_cuda_graph_state(
        self,
        max_bs: int,
        max_num_tokens: int,
        kv_indices_buf: torch.Tensor | None = None,
        cuda_graph_num_kv_splits_buf: torch.Tensor | None = None,
    ) -> None:
        is_draft_runner = self.is_draft_runner
        has_window = (self.sliding_window_size or 0) > 0
        if (self._verifies() or self._drafts()) and kv_indices_buf is None and not has_window:
            # The parent's would hold a whole context for each of a request's tokens. A row is what a request has.
            kv_indices_buf = torch.zeros(
                max_bs * self.req_to_token.shape[1], dtype=torch.int64, device=self.req_to_token.device
            )
        # The parent allocates max_bs * N * (context + N) bytes of mask, except for a drafter.
        self.is_draft_runner = True
        try:
            super().init_cuda_graph_state(max_bs, max_num_tokens, kv_indices_buf, cuda_graph_num_kv_splits_buf)
        finally:
            self.is_draft_runner = is_draft_runner
        self._graph_max_bs = max_bs
        self._graph_round = None
        self._graphs_with_tree.clear()
        self._packed_rounds.clear()
        self._indptr_of_width.clear()

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        super().init_forward_metadata_out_graph(forward_batch, in_capture)
        if not forward_batch.forward_mode.is_target_verify():
            return
        # The batch is padded to a captured size, spec_info is not.
        bs, spec_info = forward_batch.batch_size, forward_batch.spec_info
        if _is_packed(spec_info):
            tree = self._fill_packed_round(forward_batch, bs, in_capture)
            if in_capture:
                self.forward_metadata = TreeForwardMetadata(**vars(self.forward_metadata), tree=tree)
            return
        bits = self._bits(spec_info, bs)
        if in_capture:
            self._graphs_with_tree.discard(bs)
            if bits is not None:
                self._graphs_with_tree.add(bs)
        if bs not in self._graphs_with_tree:
            if bits is None:
                return
            raise RuntimeError(
                f"the CUDA graph of {bs} requests was captured without ancestor bits and would verify this round's "
                "trees causally. Give the capture's spec_info ancestor_bits of the round's shape."
            )
        tree = self._fill_graph_round(forward_batch, bits, bs)
        if in_capture:
            self.forward_metadata = TreeForwardMetadata(**vars(self.forward_metadata), tree=tree)

    def _fill_graph_round(self, forward_batch: ForwardBatch, bits: torch.Tensor | None, bs: int) -> TreeRound:
        """Write a round into the fixed buffers and plan it; ``bits`` None: chains. Returns views of ``bs`` requests."""
        spec_info = forward_batch.spec_info
        if bits is None:
            assert self._graph_round is not None, "a captured tree without buffers"
            bits = _chain_bits(self._graph_round.ancestor_bits.shape[1], self.device).expand(bs, -1, -1)
        if self._graph_round is None:
            self._check_servable()
            self._graph_round = self._allocate_graph_round(bits)
        tree, real, shape = self._graph_round.head(bs), bits.shape[0], self._graph_round.ancestor_bits.shape
        if real > bs or bits.shape[1:] != shape[1:]:
            raise RuntimeError(
                f"ancestor_bits {list(bits.shape)} do not fit the CUDA graph's {bs} requests of {list(shape[1:])}."
            )
        if not tree.is_block:
            tree.ancestor_bits[:real].copy_(bits)
            # Padding sees itself alone, whatever the last larger batch left there.
            tree.ancestor_bits[real:].copy_(self._alone)
        if tree.depths is not None:
            depths = self._depths(spec_info, forward_batch.seq_lens, bits)
            assert depths is not None
            tree.depths[:real].copy_(depths)
            tree.depths[real:].zero_()
        qo_indptr = self.qo_indptr[: bs + 1]
        extra = tree.plan.extra_splits
        plan_splits(qo_indptr, self.kv_indptr[: bs + 1], extra, out=tree.plan)
        if tree.window_plan is not None:
            plan_splits(qo_indptr, self.window_kv_indptr[: bs + 1], extra, out=tree.window_plan)
        return tree

    def _fill_packed_round(self, forward_batch: ForwardBatch, bs: int, in_capture: bool) -> TreeRound:
        """Write a packed round of at most ``bs`` requests into the fixed buffers of its T and plan it."""
        spec_info = forward_batch.spec_info
        bits, indptr = spec_info.ancestor_bits, spec_info.qo_indptr
        total, requests = bits.shape[0], indptr.shape[0] - 1
        if in_capture:
            self._check_servable()
            self._packed_rounds[total] = self._allocate_packed_round(bits, bs, _most_nodes(spec_info))
        tree = self._packed_rounds.get(total)
        if tree is None or tree.plan.requests.shape[0] != bs or requests > bs:
            raise RuntimeError(f"no CUDA graph of {bs} requests verifies {requests} requests and {total} tokens.")
        tree.ancestor_bits.copy_(bits)
        if tree.depths is not None:
            depths = self._depths(spec_info, forward_batch.seq_lens, bits)
            assert depths is not None
            tree.depths.copy_(depths)
        qo_indptr = self.qo_indptr[: bs + 1]
        qo_indptr[: requests + 1].copy_(indptr)
        if requests < bs:
            # Those that fill the graph up have no nodes.
            qo_indptr[requests + 1 :].copy_(indptr[-1:].expand(bs - requests))
        extra, weights = tree.plan.extra_splits, tree.plan.weights
        plan_splits(qo_indptr, self.kv_indptr[: bs + 1], extra, weights=weights, out=tree.plan)
        if tree.window_plan is not None:
            plan_splits(qo_indptr, self.window_kv_indptr[: bs + 1], extra, weights=weights, out=tree.window_plan)
        return tree

    def _allocate_packed_round(self, bits: torch.Tensor, bs: int, nodes: int) -> TreeRound:
        device, small_tiles = bits.device, self._small_tiles(bits.shape[0])
        extra, weights = self._splits(nodes, small_tiles)
        needed = scratch_numel(bs, extra, nodes, self.num_head, self._widest_value())
        # Graphs run one after another: the largest one's memory does for all.
        shared = max((x.scratch for x in self._packed_rounds.values()), key=torch.Tensor.numel, default=None)
        if shared is None or shared.numel() < needed:
            shared = allocate_scratch(bs, extra, nodes, self.num_head, self._widest_value(), device)
        return TreeRound(
            torch.zeros_like(bits),
            bits.new_zeros(bits.shape[0]) if self._has_window else None,
            allocate_plan(bs, extra, device, weights),
            allocate_plan(bs, extra, device, weights) if self._has_window else None,
            shared,
            is_packed=True,
            small_tiles=small_tiles,
        )

    def _allocate_graph_round(self, bits: torch.Tensor) -> TreeRound:
        max_bs, (nodes, words) = self._graph_max_bs, bits.shape[1:]
        extra = self._extra_splits(nodes)
        is_block = self._drafts()
        node = torch.arange(nodes, device=bits.device)
        self._alone = torch.zeros((nodes, words), dtype=torch.int64, device=bits.device)
        self._alone[node, node // _WORD_BITS] = torch.ones_like(node) << (node % _WORD_BITS)
        return TreeRound(
            # A block's are the same in every round, and written here alone.
            bits[:1].repeat(max_bs, 1, 1) if is_block else bits.new_zeros((max_bs, nodes, words)),
            bits.new_zeros((max_bs, nodes)) if self._has_window else None,
            allocate_plan(max_bs, extra, bits.device),
            allocate_plan(max_bs, extra, bits.device) if self._has_window else None,
            allocate_scratch(max_bs, extra, nodes, self.num_head, self._widest_value(), bits.device),
            is_block,
        )

    def _update_target_verify_buffers(
        self, bs: int, seq_lens: torch.Tensor, req_pool_indices: torch.Tensor, spec_info: Any
    ) -> Any:
        if getattr(spec_info, "custom_mask", None) is not None:
            if getattr(spec_info, "ancestor_bits", None) is None:
                raise ValueError(
                    "a CUDA graph of this backend has no buffer for a dense custom_mask: give spec_info ancestor_bits, "
                    "or run eagerly."
                )
            # The parent would copy the mask into the buffer that does not exist.
            spec_info = SimpleNamespace(draft_token_num=spec_info.draft_token_num, custom_mask=None)
        if (self.sliding_window_size or 0) > 0:
            return super()._update_target_verify_buffers(bs, seq_lens, req_pool_indices, spec_info)
        # The parent also says where a dense mask's rows begin, in seven launches, and without a mask nothing reads it.
        # A small model's round is as long as its launches.
        if not _is_packed(spec_info):
            nodes = int(getattr(spec_info, "draft_token_num", None) or self.num_draft_tokens)
            self.qo_indptr[: bs + 1].copy_(self._uniform_indptr(bs, nodes))
        return self._fill_kv_indptr_and_indices(bs, seq_lens, req_pool_indices, self.cuda_graph_kv_indices)

    def _uniform_indptr(self, bs: int, nodes: int) -> torch.Tensor:
        if nodes not in self._indptr_of_width:
            steps = torch.arange(0, (self._graph_max_bs + 1) * nodes, nodes, dtype=torch.int32, device=self.device)
            self._indptr_of_width[nodes] = steps
        return self._indptr_of_width[nodes][: bs + 1]

    # --- Per layer.

    def _extend_or_tree(self, *args: Any, **options: Any) -> None:
        """The parent's ``extend_attention_fwd`` with the same arguments; in a verify with a tree, the tree kernel."""
        tree = getattr(self.forward_metadata, "tree", None)
        window = options.get("sliding_window_size", -1)
        # A drafter's other layers, causal or with a window, are the parent's.
        if tree is None or (tree.is_block and (args[10] or window >= 0)):
            self._extend_attention(*args, **options)
            return
        q, k, v, out, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices = args[:9]
        _, is_causal, _, max_nodes, k_scale, v_scale, scaling = args[9:]
        if not is_causal and not tree.is_block:
            raise NotImplementedError("a layer that is not causal cannot verify a tree.")
        for name in ("score_mod", "aux_tensors"):
            if options.get(name) is not None:
                raise NotImplementedError(f"tree attention has no {name}.")
        if options.get("xai_temperature_len", -1) > 0:
            raise NotImplementedError("tree attention has no temperature by position (xai_temperature_len).")
        if tree.is_packed:
            # The tail belongs to no request, so that no program writes it. The next layer reads it all the same.
            out.zero_()
            max_nodes = min(max_nodes, q.shape[0])
        tree_attention(
            q,
            k,
            v,
            k_cache,
            v_cache,
            qo_indptr,
            kv_indptr,
            kv_indices,
            tree.ancestor_bits,
            max_nodes=max_nodes,
            scaling=scaling,
            depths=tree.depths,
            sliding_window=window,
            logit_cap=options.get("logit_cap", 0.0),
            k_scale=k_scale,
            v_scale=v_scale,
            sinks=options.get("sinks"),
            out=out,
            plan=tree.plan if window < 0 else tree.window_plan,
            scratch=tree.scratch,
            small_tiles=tree.small_tiles,
        )

    # --- What a round needs.

    def _small_tiles(self, tokens: int) -> Tiles | None:
        """For packed rounds of so many tokens that they may be many requests of few nodes."""
        return self._tiles(_FEW_NODES) if tokens > _FEW_TOKENS else None

    def _verifies(self) -> bool:
        return not self.is_draft_runner and not self.skip_prefill and bool(self.num_draft_tokens)

    def _drafts(self) -> bool:
        """Whether this is a drafter's backend, and nothing in its way of the tree kernel."""
        return self.is_draft_runner and not self.skip_prefill and not any(refused for refused, _ in self._refusals())

    def _bits(self, spec_info: Any, bs: int) -> torch.Tensor | None:
        """int64 [at most bs, N, W] or packed [T, W] of a target's verify or a drafter's block.

        None: not for the tree kernel.
        """
        bits = getattr(spec_info, "ancestor_bits", None)
        if self._drafts():
            nodes = int(getattr(spec_info, "draft_token_num", None) or self.num_draft_tokens)
            if nodes not in self._block_bits:
                self._block_bits[nodes] = _chain_bits(nodes, self.device)[-1:].expand(nodes, -1).contiguous()
            return self._block_bits[nodes].expand(bs, -1, -1)
        if bits is not None or not self.tree_for_chains or not self._verifies():
            return bits
        # The parent serves a chain where the kernel does not.
        if getattr(spec_info, "custom_mask", None) is not None or any(refused for refused, _ in self._refusals()):
            return None
        nodes = int(getattr(spec_info, "draft_token_num", None) or self.num_draft_tokens)
        return _chain_bits(nodes, self.device).expand(bs, -1, -1)

    def _depths(self, spec_info: Any, seq_lens: torch.Tensor, bits: torch.Tensor) -> torch.Tensor | None:
        """int64 [requests of bits, N], packed [T], where a window counts positions, else None."""
        if not self._has_window:
            return None
        depths = getattr(spec_info, "depths", None)
        if depths is not None:
            return depths.to(torch.int64).contiguous()
        bs, nodes = bits.shape[:2]
        positions = getattr(spec_info, "positions", None)
        if positions is not None:
            return (positions.view(bs, nodes) - seq_lens[:bs, None]).to(torch.int64)
        # A capture's dummy input, or a chain.
        return torch.arange(nodes, device=bits.device).expand(bs, -1).contiguous()

    def _extra_splits(self, nodes: int, tiles: Tiles | None = None) -> int:
        processors = max(1, self.device_core_count)
        return choose_extra_splits(nodes, self.num_head, self.num_kv_head, tiles or self._tiles(nodes), processors)

    def _splits(self, nodes: int, small_tiles: Tiles | None) -> tuple[int, Weights]:
        """Extra splits of packed rounds with requests of at most so many nodes, and what their parts count."""
        tiles = self._tiles(nodes)
        least = small_tiles or tiles
        weights = weigh(self.num_head, self.num_kv_head, tiles, least)
        return self._extra_splits(max(1, min(nodes, weights.few_nodes)), least), weights

    def _tiles(self, nodes: int) -> Tiles:
        """Of requests with at most so many nodes."""
        rows = nodes * self.num_head // self.num_kv_head
        shared_memory = shared_memory_of(torch.device(self.device))
        return choose_tiles(rows, self._head_dim, self._widest_value(), self._dtype, shared_memory)

    def _widest_value(self) -> int:
        return max(self.v_head_dim, self.swa_v_head_dim or 0)

    def _refusals(self) -> tuple[tuple[bool, str], ...]:
        """What would reach another kernel than the seam's, which knows no tree."""
        return (
            (self.use_mla, "multi-head latent attention (MLA)"),
            (self.dcp_size > 1, "--dcp-size above 1"),
            (self.enable_deterministic, "--enable-deterministic-inference"),
            (self.use_verify_splitkv, "SGLANG_ENABLE_SPLITKV_VERIFY"),
        )

    def _check_servable(self) -> None:
        for refused, what in self._refusals():
            if refused:
                raise NotImplementedError(f"the Triton tree-mask backend does not verify trees with {what}.")


def reads_ancestor_bits(backend: Any) -> bool:
    """Whether every backend that a target's verify may reach reads ancestor bits, so that no mask is needed."""
    # SGLang's wrappers: one backend for prefill and another for decode, or attention beside recurrent layers.
    inner = [getattr(backend, name, None) for name in ("prefill_backend", "decode_backend", "full_attn_backend")]
    parts = [part for part in inner if part is not None]
    if parts:
        return all(reads_ancestor_bits(part) for part in parts)
    return isinstance(backend, TritonTreeMaskAttnBackend)


def _is_packed(spec_info: Any) -> bool:
    return getattr(spec_info, "qo_indptr", None) is not None


def _most_nodes(packed: Any) -> int:
    """Of a request of a packed round's ``spec_info``."""
    return min(int(packed.draft_token_num), packed.ancestor_bits.shape[0])


def _chain_bits(nodes: int, device: torch.device | str) -> torch.Tensor:
    """int64 [N, W]: every node sees all before it and itself."""
    column = torch.arange(-(-nodes // _WORD_BITS) * _WORD_BITS, device=device)
    seen = column[None, :] <= torch.arange(nodes, device=device)[:, None]
    bits = torch.ones_like(column) << (column % _WORD_BITS)
    # The sum of a word's bits, wrapping around for bit 63.
    return torch.where(seen, bits, 0).view(nodes, -1, _WORD_BITS).sum(-1)
