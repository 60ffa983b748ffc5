"""Packed rounds from graphs: what is shared out, packed, committed and told lies in one place, round after round.

The verify graphs of packed rounds are keyed by their number of tokens (`ddtree_graph_runner`); what follows the choices
by requests, like `ddtree_commit_graph`, which explains why.

Letters in shapes: bs requests, C nodes of a dense tree, T verify tokens, W words of ancestor bits, P places of a path.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from sglang.srt.speculative import ddtree_ragged, ddtree_ragged_kernels
from sglang.srt.speculative.ddtree_commit_graph import Capture, TreeBuffers, VerifyTail
from sglang.srt.speculative.ddtree_kv_move import move_accepted
from sglang.srt.speculative.ddtree_ragged import (
    BINS,
    Allotment,
    PackedNodes,
    PackedWalk,
    allocate_packed,
    allocate_walk,
)
from sglang.srt.speculative.ddtree_round import PackedTree, RoundTree
from sglang.srt.speculative.ddtree_stats_kernel import tree_stats


@dataclass(frozen=True)
class PackedCommitted:
    """What a packed round commits and tells, of the running requests alone: views of one new tensor.

    Attributes:
        next_tokens: int64 [bs * P], accept_lens: int32 [bs], new_seq_lens: int64 [bs], bonus: int64 [bs]: as in
            `ddtree_ragged.PackedWalk`.
        round_stats: int64 [bs, 4] of `ddtree_stats`.
        histogram: int32 [64], expected: float32 [bs]: as in `ddtree_ragged.Allotment`.
        rows: int64 [bs, P], places among the packed nodes; overwritten by the next round.
        buffer: the tensor.
    """

    next_tokens: torch.Tensor
    accept_lens: torch.Tensor
    new_seq_lens: torch.Tensor
    bonus: torch.Tensor
    round_stats: torch.Tensor
    histogram: torch.Tensor
    expected: torch.Tensor
    rows: torch.Tensor
    buffer: torch.Tensor


@dataclass(frozen=True)
class _Places:
    """The buffers of one batch size; ``flat`` holds all that leaves the graph, ``share`` is of the same memory."""

    walk: PackedWalk
    stats: torch.Tensor
    share: Allotment
    flat: torch.Tensor


class PackedCommitGraphs:
    """One graph per captured batch size, behind whichever verify graph ran.

    A batch of raw size r runs with the graph of bs >= r requests; what those behind r do, they do to SGLang's dummy
    slot 0.

    Args:
        runner: the target's; its padded inputs ``buffers.seq_lens`` int64 [bs] and ``buffers.out_cache_loc`` int64 [T]
            are read where they lie.
        tail: of its graphs, gathering.
        budget, max_depth: of the widest tree; C = budget + 1.
        pool, feed, capture, kept: as in `ddtree_commit_graph.CommitGraphs`.
    """

    def __init__(
        self,
        *,
        runner: Any,
        tail: VerifyTail,
        budget: int,
        max_depth: int,
        pool: Any,
        feed: Callable[[torch.Tensor, PackedWalk], None],
        capture: Capture,
        kept: Any = None,
    ):
        assert tail.choices is not None and tail.gathered is not None, "the target's graphs have not been captured"
        self._runner, self._tail, self._max_depth = weakref.ref(runner), tail, max_depth
        self._sizes: list[int] = sorted(runner.capture_bs)
        self._seq_lens, self._slots = runner.buffers.seq_lens, runner.buffers.out_cache_loc
        for name in ("seq_lens", "out_cache_loc"):
            if getattr(runner.buffers, name).dtype != torch.int64:
                raise TypeError(f"{name} must be int64, got {getattr(runner.buffers, name).dtype}.")
        self._pool, self._feed, self._kept = pool, feed, kept
        self.largest = self._sizes[-1]
        self._device = self._seq_lens.device
        self.most_tokens = tail.choices.shape[0]
        self._trees = TreeBuffers(self.largest, budget, self._device)
        self._indptr = torch.full((self.largest + 1,), self.most_tokens, dtype=torch.int32, device=self._device)
        self._lens = torch.zeros(self.largest, dtype=torch.int32, device=self._device)
        self._nodes = allocate_packed(self.most_tokens, self._trees.whole.ancestor_bits.shape[2], self._device)
        for name in vars(self._nodes):
            getattr(self._nodes, name).zero_()
        # 1 for running requests: what fills a graph up has slots and choices of rounds past behind the last node.
        self._running = 0
        self._is_running = torch.zeros((self.largest, 1), dtype=torch.int64, device=self._device)
        # Views, made once.
        self._rows_of: dict[int, PackedNodes] = {}
        self._shares: dict[int, Allotment] = {}
        self._places = {bs: self._allocate(bs) for bs in self._sizes}
        self._replay = {bs: capture(partial(self._run, bs)) for bs in reversed(self._sizes)}

    @property
    def runner(self) -> Any:
        """The target's graph runner; None once SGLang has dropped it for another, whose graphs need the memory."""
        return self._runner()

    def tree(self, bs: int) -> RoundTree | None:
        """Where the trees of a round of ``bs`` requests are built; None: more than any graph holds."""
        return None if bs > self.largest else self._trees.head(bs)

    def plain_tree(self, bonus_tokens: torch.Tensor) -> RoundTree:
        """The roots alone, for a round that builds nothing; ``bonus_tokens`` int64 [bs]."""
        tree = self._trees.head(len(bonus_tokens))
        tree.tree.tokens[:, 0].copy_(bonus_tokens)
        tree.tree.num_nodes.fill_(1)
        return tree

    def pack(
        self,
        tree: RoundTree,
        total: int,
        seq_lens: torch.Tensor,
        req_pool_indices: torch.Tensor,
        req_to_token: torch.Tensor,
    ) -> PackedTree:
        """As `ddtree_round.TorchRound.pack`, of trees of `tree` or `plain_tree`, into the graphs' own memory."""
        dense = tree.tree
        bs, bits = dense.tokens.shape[0], tree.ancestor_bits
        assert bits is not None
        share = self._share_of(bs)
        if bs <= ddtree_ragged_kernels.MAX_REQUESTS:
            ddtree_ragged_kernels.allot_nodes(dense.scores, dense.num_nodes, total, out=share, validate=False)
        else:
            # More than the kernel holds: a dozen launches, in a round that is long.
            wide = ddtree_ragged.allot_nodes(dense.scores, dense.num_nodes, total)
            for name, tensor in vars(wide).items():
                getattr(share, name).copy_(tensor)
        size = self._size(bs)
        if bs < size:
            # No access leaves its tensor, whatever the requests that fill the graph up are taken to have.
            self._indptr[bs + 1 : size + 1].fill_(self.most_tokens)
        if bs != self._running:
            self._is_running[:bs].fill_(1)
            self._is_running[bs:].zero_()
            self._running = bs
        nodes = self._rows(total)
        ddtree_ragged_kernels.pack_nodes(
            dense.tokens,
            dense.depths,
            bits,
            share.qo_indptr,
            seq_lens,
            req_pool_indices,
            req_to_token,
            total,
            out=nodes,
            # Its own buffers, and those of the batch are as in a round before.
            validate=False,
        )
        return PackedTree(dense, share, nodes)

    def choices(self, total: int) -> torch.Tensor:
        """int64 [T, 1], the likeliest tokens of the last verify, and where other choices are put."""
        assert self._tail.choices is not None
        return self._tail.choices[:total, None]

    def replay(self, bs: int) -> PackedCommitted:
        """Commit the round of ``bs`` requests that was packed and verified last."""
        size = self._size(bs)
        self._replay[size]()
        places, p = self._places[size], self._max_depth + 1
        # The host's copy runs beside the next round, which writes here again.
        flat = places.flat.clone()
        at = size * p
        words = flat[at + 6 * size :].view(torch.int32)
        return PackedCommitted(
            next_tokens=flat[: bs * p],
            bonus=flat[at : at + bs],
            new_seq_lens=flat[at + size : at + size + bs],
            round_stats=flat[at + 2 * size : at + 2 * size + 4 * bs].view(bs, 4),
            accept_lens=words[:bs],
            expected=words[size : size + bs].view(torch.float32),
            histogram=words[2 * size : 2 * size + BINS],
            rows=places.walk.rows[:bs],
            buffer=flat,
        )

    def _size(self, bs: int) -> int:
        return self._sizes[bisect_left(self._sizes, bs)]

    def _rows(self, total: int) -> PackedNodes:
        return PackedNodes(**{name: x[:total] for name, x in vars(self._nodes).items()})

    def _share_of(self, bs: int) -> Allotment:
        share = self._places[self._size(bs)].share
        return replace(share, qo_lens=self._lens[:bs], qo_indptr=self._indptr[: bs + 1], expected=share.expected[:bs])

    def _allocate(self, bs: int) -> _Places:
        p, device = self._max_depth + 1, self._device
        at = bs * p
        flat = torch.zeros(at + 6 * bs + bs + BINS // 2, dtype=torch.int64, device=device)
        words = flat[at + 6 * bs :].view(torch.int32)
        walk = replace(
            allocate_walk(bs, self._max_depth, device),
            next_tokens=flat[:at].view(bs, p),
            bonus=flat[at : at + bs],
            new_seq_lens=flat[at + bs : at + 2 * bs],
            accept_lens=words[:bs],
        )
        share = Allotment(
            qo_lens=self._lens[:bs],
            qo_indptr=self._indptr[: bs + 1],
            histogram=words[2 * bs : 2 * bs + BINS],
            expected=words[bs : 2 * bs].view(torch.float32),
        )
        return _Places(walk, flat[at + 2 * bs : at + 6 * bs].view(bs, 4), share, flat)

    def _run(self, bs: int) -> None:
        places, tree = self._places[bs], self._trees.whole.head(bs)
        walk, indptr = places.walk, self._indptr[: bs + 1]
        assert self._tail.choices is not None and self._tail.gathered is not None
        ddtree_ragged_kernels.walk_packed(
            tree.tokens,
            tree.parents,
            indptr,
            self._tail.choices,
            self._max_depth,
            self._seq_lens[:bs],
            self._slots[: self.most_tokens],
            out=walk,
        )
        # What fills the graph up moves and writes SGLang's dummy slot 0.
        walk.kv_to.mul_(self._is_running[:bs])
        walk.kv_from.mul_(self._is_running[:bs])
        # What was not verified is no node for the statistics either.
        count = indptr.diff()[:, None]
        kept = torch.arange(tree.depths.shape[1], device=count.device) < count
        cut = replace(tree, depths=torch.where(kept, tree.depths, 0), num_nodes=count[:, 0].to(torch.int64))
        tree_stats(cut, walk, out=places.stats)
        hidden = self._tail.gathered.index_select(0, walk.rows.view(-1))
        move_accepted(self._pool, walk.kv_to, walk.kv_from, walk.accept_lens)
        self._feed(hidden, walk)
