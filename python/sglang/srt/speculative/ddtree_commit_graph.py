"""What follows the target's choices, replayed from one CUDA graph per batch size.

Walk, commit plan, round statistics, the moves of accepted keys and values and the drafter's share of them are about
forty launches, whose cost is the host's: for a small model they are a third of the round. None of them depends on a
number that only the host knows, so one replay does it all. Greedy choices come from the verify graph itself.

Letters in shapes: bs requests, N nodes per tree, P places of a path.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from sglang.srt.distributed.parallel_state import graph_capture
from sglang.srt.model_executor.runner_utils.pool import get_or_create_global_graph_memory_pool
from sglang.srt.speculative.ddtree_kernels import DeviceTree, DeviceWalk, allocate_tree, allocate_walk, walk_trees
from sglang.srt.speculative.ddtree_kv_move import move_accepted
from sglang.srt.speculative.ddtree_round import RoundTree
from sglang.srt.speculative.ddtree_stats_kernel import tree_stats
from sglang.srt.utils.async_probe import sanitize_nan_logits

# Runs a function until it is warm, and gives what replays it.
Capture = Callable[[Callable[[], None]], Callable[[], None]]


class VerifyTail:
    """What the target's verify graphs do last; a tail hook of SGLang's decode graph runner.

    Attributes:
        choices: int64 [tokens of the largest graph], the likeliest token of every row. None before a capture.
        hidden: by a graph's number of tokens [tokens, features], its hidden states, where every replay leaves them.
    """

    def __init__(self) -> None:
        self.choices: torch.Tensor | None = None
        self.hidden: dict[int, torch.Tensor] = {}

    def __call__(self, runner: Any, output: Any, forward_batch: Any, num_tokens: int) -> None:
        logits = output.next_token_logits
        if self.choices is None:
            # Graphs are captured from the largest down, each after it has run twice: this is not within a capture.
            self.choices = torch.zeros(num_tokens, dtype=torch.int64, device=logits.device)
        sanitize_nan_logits(logits, "DDTREE verify: target logits")
        torch.argmax(logits, dim=-1, out=self.choices[:num_tokens])
        self.hidden[num_tokens] = output.hidden_states


@dataclass(frozen=True)
class Committed:
    """What a round commits, of the running requests alone: views of one new tensor, which the next round leaves alone.

    Attributes:
        next_tokens: int64 [bs * N], accept_lens: int32 [bs], new_seq_lens: int64 [bs], bonus: int64 [bs]: as in
            `ddtree_kernels.DeviceWalk`.
        round_stats: int64 [bs, 4] of `ddtree_stats`.
        rows: int64 [bs, P], places among the bs * N nodes; no such view: overwritten by the next round.
    """

    next_tokens: torch.Tensor
    accept_lens: torch.Tensor
    new_seq_lens: torch.Tensor
    bonus: torch.Tensor
    round_stats: torch.Tensor
    rows: torch.Tensor


class TreeBuffers:
    """Trees that every round builds in the same place, and views of them by number of requests.

    Attributes:
        whole: of the most requests; roots alone until a round has been built.
    """

    def __init__(self, requests: int, budget: int, device: torch.device) -> None:
        self.whole = allocate_tree(requests, budget, device)
        for field in fields(self.whole):
            tensor = getattr(self.whole, field.name)
            if tensor is not None:
                tensor.fill_(-1 if field.name in ("parents", "first_child", "next_sibling", "ranks") else 0)
        # Every node sees the root; the root of a plain round, which nothing is built for, itself.
        self.whole.ancestor_bits[..., 0] = 1
        self.whole.num_nodes.fill_(1)
        self._heads: dict[int, RoundTree] = {}

    def head(self, bs: int) -> RoundTree:
        """The first ``bs`` requests; the same object every time."""
        if bs not in self._heads:
            tree = self.whole.head(bs)
            assert tree.positions is not None, "allocated with positions"
            self._heads[bs] = RoundTree(tree, tree.positions, tree.ancestor_bits)
        return self._heads[bs]


class CommitInputs:
    """What a commit from graphs reads and holds, whether rounds are uniform or packed.

    Args:
        runner: the target's; its padded inputs ``buffers.seq_lens`` int64 [bs] and ``buffers.out_cache_loc`` int64
            [tokens] are read where they lie.
        tail: of its graphs.
        budget: of the widest tree.
        requests: the most that a graph holds.
        pool: what `ddtree_kv_move.movable` gave.
        kept: what the drafter's writer uses and nobody else may free.

    Attributes:
        largest: ``requests``.
    """

    def __init__(self, *, runner: Any, tail: VerifyTail, budget: int, requests: int, pool: Any, kept: Any) -> None:
        assert tail.choices is not None, "the target's graphs have not been captured"
        self._runner, self._tail, self._pool, self._kept = weakref.ref(runner), tail, pool, kept
        self._seq_lens, self._slots = runner.buffers.seq_lens, runner.buffers.out_cache_loc
        for name in ("seq_lens", "out_cache_loc"):
            if getattr(runner.buffers, name).dtype != torch.int64:
                raise TypeError(f"{name} must be int64, got {getattr(runner.buffers, name).dtype}.")
        self.largest = requests
        self._trees = TreeBuffers(requests, budget, self._seq_lens.device)

    @property
    def runner(self) -> Any:
        """The target's graph runner; None once SGLang has dropped it for another, whose graphs need the memory."""
        return self._runner()

    def tree(self, bs: int) -> RoundTree | None:
        """Where the trees of a round of ``bs`` requests are built; None: more than any graph holds."""
        return None if bs > self.largest else self._trees.head(bs)


@dataclass(frozen=True)
class _Places:
    """The buffers of one batch size; ``flat`` holds all that leaves the graph."""

    tree: DeviceTree
    walk: DeviceWalk
    stats: torch.Tensor
    flat: torch.Tensor


class CommitGraphs(CommitInputs):
    """One graph per captured batch size of the target, behind its verify graph of that size.

    A batch of raw size r runs with the graph of bs >= r requests. Those behind r walk an old tree, move SGLang's dummy
    slot 0 onto itself and write the drafter's dummy slot.

    Args:
        runner, tail, pool, kept: as in `CommitInputs`; the runner's ``bs`` says in which graph the last verify ran.
        budget, max_depth: of the served trees.
        feed: writes the drafter's keys and values: hidden states [bs * P, features] along the paths, and the walk.
        capture: see `cuda_capture`.
    """

    def __init__(
        self,
        *,
        runner: Any,
        tail: VerifyTail,
        budget: int,
        max_depth: int,
        pool: Any,
        feed: Callable[[torch.Tensor, DeviceWalk], None],
        capture: Capture,
        kept: Any = None,
    ):
        sizes: list[int] = list(runner.capture_bs)
        super().__init__(runner=runner, tail=tail, budget=budget, requests=max(sizes), pool=pool, kept=kept)
        self._max_depth, self._nodes, self._feed = max_depth, budget + 1, feed
        device = self._seq_lens.device
        self._places = {bs: self._allocate(bs, device) for bs in sizes}
        # From the largest down: the smaller ones fit into its memory.
        self._replay = {bs: capture(partial(self._run, bs)) for bs in sorted(sizes, reverse=True)}

    def choices(self, bs: int) -> torch.Tensor:
        """int64 [bs, N], the likeliest tokens of the last verify, and where other choices are put."""
        assert self._tail.choices is not None
        return self._tail.choices[: bs * self._nodes].view(bs, self._nodes)

    def replay(self, raw_bs: int) -> Committed:
        """Commit the round of ``raw_bs`` requests whose verify was the runner's last."""
        bs = self.runner.bs
        self._replay[bs]()
        places, n = self._places[bs], self._nodes
        # The host's copy runs beside the next round, which writes here again.
        flat = places.flat.clone()
        at = bs * n
        rows = places.walk.rows
        assert rows is not None
        return Committed(
            next_tokens=flat[: raw_bs * n],
            bonus=flat[at : at + raw_bs],
            new_seq_lens=flat[at + bs : at + bs + raw_bs],
            round_stats=flat[at + 2 * bs : at + 2 * bs + 4 * raw_bs].view(raw_bs, 4),
            accept_lens=flat[at + 6 * bs :].view(torch.int32)[:raw_bs],
            rows=rows[:raw_bs],
        )

    def _allocate(self, bs: int, device: torch.device) -> _Places:
        n = self._nodes
        flat = torch.zeros(bs * (n + 6) + (bs + 1) // 2, dtype=torch.int64, device=device)
        walk = allocate_walk(bs, n, self._max_depth, device, slots=True)
        at = bs * n
        own = {
            "next_tokens": flat[:at].view(bs, n),
            "bonus": flat[at : at + bs],
            "new_seq_lens": flat[at + bs : at + 2 * bs],
            "accept_lens": flat[at + 6 * bs :].view(torch.int32)[:bs],
        }
        values = {field.name: own.get(field.name, getattr(walk, field.name)) for field in fields(walk)}
        stats = flat[at + 2 * bs : at + 6 * bs].view(bs, 4)
        return _Places(self._trees.whole.head(bs), DeviceWalk(**values), stats, flat)

    def _run(self, bs: int) -> None:
        places, n = self._places[bs], self._nodes
        tree, walk = places.tree, places.walk
        walk_trees(
            tree.tokens,
            tree.parents,
            self.choices(bs),
            self._max_depth,
            seq_lens=self._seq_lens[:bs],
            slots=self._slots[: bs * n].view(bs, n),
            out=walk,
        )
        tree_stats(tree, walk, out=places.stats)
        assert walk.rows is not None and walk.kv_to is not None and walk.kv_from is not None
        hidden = self._tail.hidden[bs * n].index_select(0, walk.rows.view(-1))
        if self._pool is not None:
            move_accepted(self._pool, walk.kv_to, walk.kv_from, walk.accept_lens)
        self._feed(hidden, walk)


def cuda_capture(device: torch.device | str) -> tuple[Any, Capture]:
    """A context to capture in, and a `Capture` that is valid within it, in SGLang's pool of graph memory."""
    module = torch.get_device_module(device)
    context = graph_capture()

    def capture(run: Callable[[], None]) -> Callable[[], None]:
        # Kernels are compiled and workspaces allocated outside of the graph.
        for _ in range(2):
            module.synchronize()
            run()
        module.synchronize()
        graph = torch.cuda.CUDAGraph()
        pool = get_or_create_global_graph_memory_pool(module)
        with module.graph(cuda_graph=graph, pool=pool, stream=module.current_stream()):
            run()
        return graph.replay

    return context, capture


def with_own_workspace(helper: Any) -> Any:
    """SGLang's fused writer of the drafter's keys and values with buffers that no other call reallocates.

    It shares the weights. The original grows its buffers when a longer prompt comes, and frees those that a graph
    would go on writing to.
    """
    own = copy.copy(helper)
    own._proj_workspace = own._k_workspace = own._v_workspace = own._workspace_dtype = None
    own._workspace_capacity = 0
    return own
