"""Packed rounds from graphs: what is shared out, packed, committed and told lies in one place, round after round.

The verify graphs of packed rounds are keyed by their number of tokens (`ddtree_graph_runner`), and so is what follows
the choices: as many rows are fed to the drafter as were verified. `ddtree_commit_graph` explains why there are such
graphs.

Letters in shapes: bs requests, C nodes of a dense tree, T verify tokens, W words of ancestor bits, P places of a path.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from sglang.srt.speculative import ddtree_ragged, ddtree_ragged_kernels
from sglang.srt.speculative.ddtree_commit_graph import Capture, CommitInputs, Committed, VerifyTail
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
class PackedCommitted(Committed):
    """What a packed round commits and tells; of paths of P places, not of N nodes.

    Attributes:
        histogram: int32 [64], expected: float32 [bs]: as in `ddtree_ragged.Allotment`; views as well.
    """

    histogram: torch.Tensor
    expected: torch.Tensor


@dataclass(frozen=True)
class _Places:
    """The buffers of one total; ``flat`` holds all that leaves the graph, ``share`` is of the same memory."""

    walk: PackedWalk
    stats: torch.Tensor
    share: Allotment
    flat: torch.Tensor
    requests: int


class PackedCommitGraphs(CommitInputs):
    """One graph per captured total of verify tokens, behind the verify graph of that total.

    A graph of T tokens holds as many requests as the verify graph; what those behind the running ones do, they do to
    SGLang's dummy slot 0.

    Args:
        runner, tail, pool, kept: as in `ddtree_commit_graph.CommitInputs`.
        budget, max_depth: of the widest tree; C = budget + 1.
        capture: see `ddtree_commit_graph.cuda_capture`.
        feed: writes the drafter's keys and values: hidden states [T, features], slots int64 [T], of which those of rows
            that were not accepted are the dummy one, and positions int64 [T].
    """

    def __init__(
        self,
        *,
        runner: Any,
        tail: VerifyTail,
        budget: int,
        max_depth: int,
        pool: Any,
        feed: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None],
        capture: Capture,
        kept: Any = None,
    ):
        super().__init__(runner=runner, tail=tail, budget=budget, requests=runner.max_bs, pool=pool, kept=kept)
        self._max_depth, self._feed, self._device = max_depth, feed, self._seq_lens.device
        totals: list[int] = sorted(runner.capture_num_tokens)
        self._indptr = torch.full((self.largest + 1,), totals[-1], dtype=torch.int32, device=self._device)
        self._lens = torch.zeros(self.largest, dtype=torch.int32, device=self._device)
        self._nodes = allocate_packed(totals[-1], self._trees.whole.ancestor_bits.shape[2], self._device)
        for name in vars(self._nodes):
            getattr(self._nodes, name).zero_()
        # Requests and tokens of the last round, whose buffers are filled up.
        self._last = (0, 0)
        # 1 for running requests: what fills a graph up has slots and choices of rounds past behind the last node.
        self._is_running = torch.zeros((self.largest, 1), dtype=torch.int64, device=self._device)
        # Views, made once.
        self._rows_of: dict[int, PackedNodes] = {}
        self._shares: dict[tuple[int, int], Allotment] = {}
        self._places = {total: self._allocate(total, runner._ragged_capture_slots(total)) for total in totals}
        # From the largest down: the smaller ones fit into its memory.
        self._replay = {total: capture(partial(self._run, total)) for total in reversed(totals)}
        self._compile_packing()

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
        share = self._share_of(bs, total)
        if bs <= ddtree_ragged_kernels.MAX_REQUESTS:
            ddtree_ragged_kernels.allot_nodes(dense.scores, dense.num_nodes, total, out=share, validate=False)
        else:
            # More than the kernel holds: a dozen launches, in a round that is long.
            wide = ddtree_ragged.allot_nodes(dense.scores, dense.num_nodes, total)
            for name, tensor in vars(wide).items():
                getattr(share, name).copy_(tensor)
        held, last = self._places[total].requests, self._last
        self._last = bs, total
        if bs < held and last != (bs, total):
            # No access leaves its tensor, whatever the requests that fill the graph up are taken to have.
            self._indptr[bs + 1 : held + 1].fill_(total)
        if bs != last[0]:
            self._is_running[:bs].fill_(1)
            self._is_running[bs:].zero_()
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

    def replay(self, bs: int, total: int) -> PackedCommitted:
        """Commit the round of ``bs`` requests that was packed and verified last, ``total`` tokens."""
        self._replay[total]()
        places, p = self._places[total], self._max_depth + 1
        # The host's copy runs beside the next round, which writes here again.
        flat = places.flat.clone()
        held = places.requests
        at = held * p
        words = flat[at + 6 * held :].view(torch.int32)
        return PackedCommitted(
            next_tokens=flat[: bs * p],
            bonus=flat[at : at + bs],
            new_seq_lens=flat[at + held : at + held + bs],
            round_stats=flat[at + 2 * held : at + 2 * held + 4 * bs].view(bs, 4),
            accept_lens=words[:bs],
            expected=words[held : held + bs].view(torch.float32),
            histogram=words[2 * held : 2 * held + BINS],
            rows=places.walk.rows[:bs],
        )

    def _compile_packing(self) -> None:
        """Run the two kernels that no graph holds in every shape that is compiled apart, before any request waits."""
        columns = torch.zeros((1, 1), dtype=torch.int32, device=self._device)
        for total, places in self._places.items():
            sizes = {2**power for power in range(places.requests.bit_length())} | {places.requests}
            for bs in sizes:
                tree, zeros = self._trees.head(bs), torch.zeros(bs, dtype=torch.int64, device=self._device)
                self.pack(tree, total, zeros, zeros, columns)
        self._is_running.zero_()
        self._last = (0, 0)
        if self._device.type == "cuda":
            # This may not be the stream of the next round, which writes the same buffers.
            torch.cuda.synchronize()

    def _rows(self, total: int) -> PackedNodes:
        if total not in self._rows_of:
            self._rows_of[total] = PackedNodes(**{name: x[:total] for name, x in vars(self._nodes).items()})
        return self._rows_of[total]

    def _share_of(self, bs: int, total: int) -> Allotment:
        if (bs, total) not in self._shares:
            share = self._places[total].share
            self._shares[bs, total] = replace(
                share, qo_lens=self._lens[:bs], qo_indptr=self._indptr[: bs + 1], expected=share.expected[:bs]
            )
        return self._shares[bs, total]

    def _allocate(self, total: int, held: int) -> _Places:
        p, device = self._max_depth + 1, self._device
        at = held * p
        flat = torch.zeros(at + 7 * held + BINS // 2, dtype=torch.int64, device=device)
        words = flat[at + 6 * held :].view(torch.int32)
        walk = replace(
            allocate_walk(held, self._max_depth, device),
            next_tokens=flat[:at].view(held, p),
            bonus=flat[at : at + held],
            new_seq_lens=flat[at + held : at + 2 * held],
            accept_lens=words[:held],
        )
        share = Allotment(
            qo_lens=self._lens[:held],
            qo_indptr=self._indptr[: held + 1],
            histogram=words[2 * held : 2 * held + BINS],
            expected=words[held : 2 * held].view(torch.float32),
        )
        return _Places(walk, flat[at + 2 * held : at + 6 * held].view(held, 4), share, flat, held)

    def _run(self, total: int) -> None:
        places = self._places[total]
        walk, held = places.walk, places.requests
        tree, indptr, running = self._trees.whole.head(held), self._indptr[: held + 1], self._is_running[:held]
        assert self._tail.choices is not None
        ddtree_ragged_kernels.walk_packed(
            tree.tokens,
            tree.parents,
            indptr,
            self._tail.choices[:total],
            self._max_depth,
            self._seq_lens[:held],
            self._slots[:total],
            out=walk,
        )
        # What fills the graph up moves and writes SGLang's dummy slot 0.
        walk.kv_to.mul_(running)
        walk.kv_from.mul_(running)
        # What was not verified is no node for the statistics either.
        count = indptr.diff()[:, None]
        kept = torch.arange(tree.depths.shape[1], device=count.device) < count
        cut = replace(tree, depths=torch.where(kept, tree.depths, 0), num_nodes=count[:, 0].to(torch.int64))
        tree_stats(cut, walk, out=places.stats)
        move_accepted(self._pool, walk.kv_to, walk.kv_from, walk.accept_lens)
        # From places of paths to rows; a row behind the last one takes what is of no path.
        place = torch.arange(walk.rows.shape[1], device=count.device)
        used = (place < walk.accept_lens[:, None]) & (running > 0)
        row = torch.where(used, walk.rows, total).view(-1)
        slots, positions = (torch.zeros(total + 1, dtype=torch.int64, device=self._device) for _ in range(2))
        slots.scatter_(0, row, walk.kv_to.view(-1))
        positions.scatter_(0, row, walk.positions.view(-1))
        self._feed(self._tail.hidden[total], slots[:total], positions[:total])
