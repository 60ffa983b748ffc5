"""DDTree (Diffusion Draft Tree, arXiv 2604.12989), the algorithm alone: build, compile and walk draft trees.

A block drafter gives one distribution per block position 1..D-1. A tree node is a tuple of ranks
(r1, ..., rd) into those positions' candidates; its score is the float32 running sum of their
log-probabilities. The tree is the `budget` nodes with the highest scores; equal scores go to the shallower
node, then to the one whose parent was selected earlier, then to the lower rank. Node 0 is the root (the last
committed token), and nodes follow in selection order, so a parent always has a smaller index than its child.

This module needs torch and the standard library only. The batched functions run on any device and do not
synchronise with the host (no `.item()`, no boolean indexing, no shape that depends on data), save where a
docstring says so. `build_tree_heap` is the readable reference that `build_trees` equals bit for bit.

Letters in shapes: bs requests, N = budget + 1 nodes, D block size, K candidates per position, V vocabulary.
"""

from __future__ import annotations

import ctypes
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_WORD_BITS = 64


@dataclass(frozen=True, eq=False)
class DraftTree:
    """A batch of draft trees, all tensors on one device.

    Padding nodes exist where the candidates cannot fill the budget. They are the last ones, are linked to
    nothing and see only themselves. Their token is 0, which is also a real token: only `num_nodes` (or
    `ranks` < 0 beyond node 0) tells padding.

    Attributes:
        tokens: int64 [bs, N]; node 0 is the root's token, 0 for padding.
        parents: int64 [bs, N]; index of the parent, -1 for the root and for padding.
        depths: int64 [bs, N]; 0 for the root and for padding.
        scores: float32 [bs, N]; natural-log probability of the path, 0.0 for the root, -inf for padding
            (a real node of probability zero has -inf too).
        ranks: int64 [bs, N]; rank among the candidates of the node's position, -1 for the root and padding.
        num_nodes: int64 [bs]; real nodes, the root counted.
        first_child: int64 [bs, N]; the child with the lowest index, -1 if none.
        next_sibling: int64 [bs, N]; the next higher index with the same parent, -1 if none.
        visible: bool [bs, N, N]; True: the row may attend the column (itself or an ancestor).
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    scores: torch.Tensor
    ranks: torch.Tensor
    num_nodes: torch.Tensor
    first_child: torch.Tensor
    next_sibling: torch.Tensor
    visible: torch.Tensor


@dataclass(frozen=True)
class HostTree:
    """One request's tree as plain lists of its real nodes, root first, without padding.

    Attributes:
        tokens, parents, depths, ranks: ints, as in `DraftTree` (the root's parent and rank are -1).
        scores: floats that are exactly float32 values.
    """

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    scores: list[float]
    ranks: list[int]


@dataclass(frozen=True, eq=False)
class WalkResult:
    """What one verify round commits, per request.

    Attributes:
        accept_index: int64 [bs, max_depth + 1]; the accepted path as node indices of the request's own tree,
            beginning with the root 0, then -1.
        num_accepted_drafts: int64 [bs]; drafted nodes on the path, the root not counted. The round commits
            one token more: the bonus.
        bonus: int64 [bs]; the target's choice at the last node of the path, the next root.
    """

    accept_index: torch.Tensor
    num_accepted_drafts: torch.Tensor
    bonus: torch.Tensor


@dataclass(frozen=True, eq=False)
class CommitPlan:
    """Where the tokens that a walk accepted come from and go to, per request.

    P = max_depth + 1 places, at most N. Behind the last accepted node a place points at its own node, so that
    moving it moves nothing.

    Attributes:
        next_tokens: int64 [bs, N]; the committed tokens in front (the target's choices along the path, the bonus
            last), 0 behind.
        accept_lens: int32 [bs]; committed tokens, num_accepted_drafts + 1.
        new_seq_lens: [bs], seq_lens + accept_lens in the dtype of `seq_lens`.
        rows: int64 [bs, P]; the path's nodes among all bs * N rows of the verified batch.
        kv_from: int64 [bs, P]; the KV slots of those nodes.
        kv_to: int64 [bs, P]; the front slots of the round, where they belong.
        positions: int64 [bs, P]; seq_lens + 0, 1, 2 ...
    """

    next_tokens: torch.Tensor
    accept_lens: torch.Tensor
    new_seq_lens: torch.Tensor
    rows: torch.Tensor
    kv_from: torch.Tensor
    kv_to: torch.Tensor
    positions: torch.Tensor


def max_tree_nodes(block_size: int, topk: int, limit: int) -> int:
    """How many drafted nodes a tree can have: min(limit, K + K^2 + ... + K^(D-1)), the root not counted.

    A tree of budget B has `max_tree_nodes(D, K, B)` real drafted nodes whatever the probabilities are, so
    padding is known without looking at data.

    Args:
        block_size: D, the drafter's block size, the root's position counted; at least 2.
        topk: K, candidates per position; at least 1.
        limit: where to stop counting, usually the budget; at least 0.

    Raises:
        ValueError: an argument is below its minimum.
    """
    for name, value, least in (("block_size", block_size, 2), ("topk", topk, 1), ("limit", limit, 0)):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}.")
    total, level = 0, 1
    for _ in range(block_size - 1):
        # Saturate the level too, or K^(D-1) becomes a needlessly long integer.
        level = min(level * topk, limit)
        total += level
        if total >= limit:
            return limit
    return total


def _add_float32(a: float, b: float) -> float:
    # The double sum of two float32 values rounds to the correctly rounded float32 sum: 53 >= 2 * 24 + 2 bits.
    return ctypes.c_float(a + b).value


def build_tree_heap(
    root_token: int,
    candidate_ids: torch.Tensor | Sequence[Sequence[int]],
    candidate_logprobs: torch.Tensor | Sequence[Sequence[float]],
    budget: int,
) -> HostTree:
    """Build one tree by best-first search on the host: the reference of `build_trees`.

    A heap keyed (-score, depth, parent's index, rank) pops the nodes in selection order.

    Args:
        root_token: the last committed token.
        candidate_ids: int [D-1, K], best first.
        candidate_logprobs: float32 [D-1, K], natural log, <= 0, no NaN, non-increasing in K.
        budget: drafted nodes wanted, the root not counted; at least 1.

    Raises:
        ValueError: budget is below 1.
    """
    _check_budget(budget)
    ids = candidate_ids.tolist() if isinstance(candidate_ids, torch.Tensor) else candidate_ids
    lps = candidate_logprobs.tolist() if isinstance(candidate_logprobs, torch.Tensor) else candidate_logprobs
    lps = [[ctypes.c_float(lp).value for lp in row] for row in lps]

    tree = HostTree(tokens=[root_token], parents=[-1], depths=[0], scores=[0.0], ranks=[-1])
    heap: list[tuple[float, int, int, int]] = []

    def push_children(index: int) -> None:
        depth = tree.depths[index] + 1
        if depth <= len(lps):
            for rank, lp in enumerate(lps[depth - 1]):
                heapq.heappush(heap, (-_add_float32(tree.scores[index], lp), depth, index, rank))

    push_children(0)
    while heap and len(tree.tokens) <= budget:
        negative_score, depth, parent, rank = heapq.heappop(heap)
        tree.tokens.append(int(ids[depth - 1][rank]))
        tree.parents.append(parent)
        tree.depths.append(depth)
        # 0.0 - x, because -(0.0) would be the other zero.
        tree.scores.append(0.0 - negative_score)
        tree.ranks.append(rank)
        push_children(len(tree.tokens) - 1)
    return tree


def build_trees(
    root_tokens: torch.Tensor,
    candidate_ids: torch.Tensor,
    candidate_logprobs: torch.Tensor,
    budget: int,
    *,
    validate: bool = True,
) -> DraftTree:
    """Build every request's tree on the tensors' device, bit for bit what `build_tree_heap` builds.

    Args:
        root_tokens: int64 [bs], the last committed tokens.
        candidate_ids: int64 [bs, D-1, K], distinct within a position, best first. Any K >= 1 is accepted;
            ranks from `budget` on cannot be selected.
        candidate_logprobs: float32 [bs, D-1, K], natural log over the whole vocabulary: <= 0, no NaN,
            non-increasing in K; -inf is probability zero. Same device as the ids.
        budget: drafted nodes per tree, the root not counted; at least 1. N = budget + 1.
        validate: also check the values of `candidate_logprobs`, which synchronises with the device. With
            False nothing here waits for the device; values outside the contract then give an unspecified
            tree. Shapes, dtypes and devices are checked either way, since that costs nothing.

    Returns:
        A `DraftTree` of freshly allocated tensors. No input is changed.

    Raises:
        ValueError: a shape, dtype, device, value or the budget is not as above.
    """
    _check_budget(budget)
    _check_candidates(root_tokens, candidate_ids, candidate_logprobs)
    if validate:
        _check_logprob_values(candidate_logprobs)

    # Why level by level gives the heap's tree. Write u < v for the order (-score, depth, parent's place,
    # rank), where parents are placed by the same order.
    # (1) A parent precedes its child: float32 addition is monotone and log-probabilities are <= 0, so a
    #     child's score is at most its parent's; if equal (log-probability 0, absorbed by rounding, or both
    #     -inf) the parent is shallower. Hence the heap, which meets a node once its parent is popped, pops
    #     nodes in the order <, and the tree is the first B nodes of all.
    # (2) Within one depth, < is (-score, parent's place within its depth, rank). Suppose `beam` holds, in
    #     order, some nodes of depth d-1 that include all of the first B nodes of all which lie there. A node
    #     of depth d among the first B has its parent among them by (1), so it is a child of the beam. A
    #     stable descending sort of the children laid out [parent, rank] is the order <, and the first B of
    #     it keep that node: fewer than B nodes precede it at all. By induction every beam is good.
    # (3) The beams laid out by depth, each in its own order, sorted once more by score, stably: ties fall
    #     first by depth, then by place within the depth. That is < again, so its first B are the tree.
    # Nothing above needs finite scores: -inf ties like any other value, and no empty slot enters a sort,
    # because the number of nodes at each depth is known statically.
    # torch.topk leaves the order of ties unspecified, hence the stable sorts.
    bs, levels, _ = candidate_ids.shape
    device = candidate_ids.device
    # A rank >= B has B siblings before it (equal or better score, lower rank): it can never be selected.
    topk = min(candidate_ids.shape[2], budget)
    candidate_ids = candidate_ids[:, :, :topk]
    candidate_logprobs = candidate_logprobs[:, :, :topk]

    # Sums start from the root's +0.0, so a log-probability of -0.0 never leaves a -0.0 score, which a
    # bitwise sort could put behind +0.0.
    beam = torch.zeros((bs, 1), dtype=torch.float32, device=device)
    minus_one = torch.full((bs, 1), -1, dtype=torch.int64, device=device)
    level_tokens, level_scores = [root_tokens[:, None]], [beam]
    level_parents, level_ranks = [minus_one], [minus_one]
    level_depths = [torch.zeros((bs, 1), dtype=torch.int64, device=device)]
    previous_offset, offset = 0, 1
    for level in range(levels):
        children = (beam[:, :, None] + candidate_logprobs[:, level, None, :]).flatten(1)
        width = min(budget, children.shape[1])
        sorted_scores, order = torch.sort(children, dim=1, descending=True, stable=True)
        beam, order = sorted_scores[:, :width], order[:, :width]
        ranks = order % topk
        level_tokens.append(candidate_ids[:, level].gather(1, ranks))
        level_scores.append(beam)
        level_parents.append(torch.div(order, topk, rounding_mode="floor") + previous_offset)
        level_ranks.append(ranks)
        level_depths.append(torch.full_like(order, level + 1))
        previous_offset, offset = offset, offset + width

    # The root enters this sort as well and stays first by (1), so slots and node indices need no shift.
    real = 1 + max_tree_nodes(levels + 1, topk, budget)
    scores, order = torch.sort(torch.cat(level_scores, dim=1), dim=1, descending=True, stable=True)
    place = torch.empty_like(order)
    place.scatter_(1, order, torch.arange(offset, device=device).expand(bs, offset))
    order = order[:, :real]
    parents = place.gather(1, torch.cat(level_parents, dim=1).gather(1, order).clamp_(min=0))
    parents[:, 0].fill_(-1)

    padding = budget + 1 - real

    def pad(x: torch.Tensor, value: float) -> torch.Tensor:
        return torch.nn.functional.pad(x, (0, padding), value=value)

    parents = pad(parents, -1)
    first_child, next_sibling = link_children(parents)
    return DraftTree(
        tokens=pad(torch.cat(level_tokens, dim=1).gather(1, order), 0),
        parents=parents,
        depths=pad(torch.cat(level_depths, dim=1).gather(1, order), 0),
        scores=pad(scores[:, :real], float("-inf")),
        ranks=pad(torch.cat(level_ranks, dim=1).gather(1, order), -1),
        num_nodes=torch.full((bs,), real, dtype=torch.int64, device=device),
        first_child=first_child,
        next_sibling=next_sibling,
        visible=ancestor_mask(parents, levels),
    )


def link_children(parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """First-child and next-sibling links of a batch of trees, without a host synchronisation.

    Args:
        parents: int64 [bs, N]; -1 for the root and for padding, which are therefore never linked.

    Returns:
        `first_child`, `next_sibling`: int64 [bs, N], -1 for none; siblings ascend by index.
    """
    n = parents.shape[1]
    index = torch.arange(n, device=parents.device)
    child_of = parents[:, None, :] == index[:, None]
    later_sibling = (parents[:, :, None] == parents[:, None, :]) & (parents >= 0)[:, :, None]
    later_sibling &= index > index[:, None]
    return _first_true(child_of), _first_true(later_sibling)


def _first_true(mask: torch.Tensor) -> torch.Tensor:
    """Index of the first True along the last dimension, int64, -1 if there is none."""
    n = mask.shape[-1]
    first = torch.where(mask, torch.arange(n, device=mask.device), n).amin(-1)
    return torch.where(first < n, first, -1)


def ancestor_mask(parents: torch.Tensor, depth_limit: int) -> torch.Tensor:
    """Who sees whom in a batch of trees, without a host synchronisation.

    Args:
        parents: int64 [bs, N]; -1 for the root and for padding.
        depth_limit: no node is deeper than this; usually D-1.

    Returns:
        bool [bs, N, N]; True: the row may attend the column, which is the row itself or an ancestor of it.
        A padding row sees only itself.
    """
    bs, n = parents.shape
    index = torch.arange(n, device=parents.device)
    # Doubling: each step joins a node's span with that of the ancestor just beyond it. A root or padding node
    # points at itself, which adds nothing.
    up = torch.where(parents >= 0, parents, index)
    visible = (index[:, None] == index).expand(bs, n, n)
    span = 1
    while span <= depth_limit:
        visible = visible | visible.gather(1, up[:, :, None].expand(bs, n, n))
        up = up.gather(1, up)
        span *= 2
    return visible.contiguous()


def tree_positions(depths: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
    """Positions of the nodes: committed length + depth; the root sits at the committed length.

    Args:
        depths: int64 [bs, N].
        seq_lens: int32 or int64 [bs], committed tokens per request, the root not counted.

    Returns:
        int64 [bs, N].
    """
    return seq_lens[:, None].to(torch.int64) + depths


def full_mask(
    visible: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    total: int | None = None,
) -> torch.Tensor:
    """SGLang's FULL_MASK: prefix and tree columns of every node, flattened.

    Request b has N rows of seq_lens[b] + N columns, row-major; requests follow each other without gaps, so
    request b begins at N * sum(seq_lens[:b]) + N * N * b. True: the row may attend the column. Prefix
    columns are True, tree columns are `visible`.

    Args:
        visible: bool [bs, N, N]; True: the row may attend the column.
        seq_lens: int32 or int64 [bs], committed tokens per request, same device.
        out: bool, 1-D, contiguous, same device, at least as long as the mask: written in place. Cells behind
            the mask become True as well, unless `total` bounds what is written.
        total: the mask's length, N * sum(seq_lens) + bs * N * N, if the host knows it.

    With `out` or `total` nothing waits for the device (and the device alone can tell that `total`, or a
    buffer given without it, is too small). With neither, the length is read back, which synchronises.

    Returns:
        bool, 1-D: a new tensor, or `out`, cut to `total` if that is given.

    Raises:
        ValueError: `out` is not a 1-D bool buffer or is shorter than what is known of the mask.
    """
    bs, n, _ = visible.shape
    lens = seq_lens.to(torch.int64)
    if out is None:
        if total is None:
            total = n * int(lens.sum()) + bs * n * n
        mask = torch.ones(total, dtype=torch.bool, device=visible.device)
    else:
        if out.dtype != torch.bool or out.dim() != 1:
            raise ValueError(f"out must be a 1-D bool tensor, got {list(out.shape)} {out.dtype}.")
        needed = bs * n * n if total is None else total
        if out.numel() < needed:
            raise ValueError(f"out must hold at least {needed} cells, got {out.numel()}.")
        mask = out if total is None else out[:total]
        mask.fill_(True)
    begin = n * (lens.cumsum(0) - lens) + n * n * torch.arange(bs, device=lens.device)
    index = torch.arange(n, device=lens.device)
    row_begin = begin[:, None] + index * (lens[:, None] + n) + lens[:, None]
    cells = row_begin[:, :, None] + index
    mask.scatter_(0, cells.flatten(), visible.flatten())
    return mask


def qlen_only_mask(visible: torch.Tensor) -> torch.Tensor:
    """SGLang's QLEN_ONLY mask: tree columns only, flattened; every prefix column counts as visible.

    Args:
        visible: bool [bs, N, N]; True: the row may attend the column.

    Returns:
        bool [bs * N * N], row-major; shares memory with a contiguous `visible`.
    """
    return visible.reshape(-1)


def bit_mask(visible: torch.Tensor) -> torch.Tensor:
    """The tree mask as N bits per node, without a host synchronisation.

    Args:
        visible: bool [bs, N, N]; True: the row may attend the column.

    Returns:
        int64 [bs, N, ceil(N / 64)]; bit j % 64 of word j // 64 is set if and only if the row may attend
        column j. Bit 63 is the sign bit, so read the words as unsigned.
    """
    bs, n, _ = visible.shape
    words = -(-n // _WORD_BITS)
    bits = torch.nn.functional.pad(visible.to(torch.int64), (0, words * _WORD_BITS - n))
    shifts = torch.arange(_WORD_BITS, device=visible.device)
    # Distinct bits do not carry, so their sum is their union, the sign bit included.
    return torch.bitwise_left_shift(bits.reshape(bs, n, words, _WORD_BITS), shifts).sum(-1)


def walk_trees(tokens: torch.Tensor, parents: torch.Tensor, choices: torch.Tensor, max_depth: int) -> WalkResult:
    """Follow the target's choices down every tree, without a host synchronisation.

    At each node the target's choice is taken: if it is a child's token the walk goes there, else it stops
    and that choice is the bonus token. A node is visited at most once, so with one independent draw per node
    the committed tokens are distributed exactly as the target's.

    Children are found through `parents`, so padding (parent -1) is never reached, whatever its token. This is
    the walk along `first_child` and `next_sibling`, in one comparison per depth instead of one per sibling.
    If two siblings carried the same token the first would win.

    Args:
        tokens: int64 [bs, N].
        parents: int64 [bs, N]; -1 for the root and for padding.
        choices: int64 [bs, N], the target's token at every node; a value that is no token matches nothing.
        max_depth: steps at most, usually D-1; deeper nodes are not accepted.

    Returns:
        `WalkResult`.
    """
    bs = tokens.shape[0]
    current = torch.zeros((bs, 1), dtype=torch.int64, device=tokens.device)
    path = [current]
    for _ in range(max_depth):
        # A walk that has stopped stays at its node, where the same choice finds no child again.
        matches = (parents == current) & (tokens == choices.gather(1, current))
        child = _first_true(matches)[:, None]
        path.append(child)
        current = torch.where(child >= 0, child, current)
    accept_index = torch.cat(path, dim=1)
    return WalkResult(
        accept_index=accept_index,
        num_accepted_drafts=(accept_index[:, 1:] >= 0).sum(1),
        bonus=choices.gather(1, current)[:, 0],
    )


def plan_commit(walk: WalkResult, choices: torch.Tensor, seq_lens: torch.Tensor, slots: torch.Tensor) -> CommitPlan:
    """What a round does after its walk, without a host synchronisation.

    Args:
        walk: of `walk_trees`, P = max_depth + 1 places, at most N.
        choices: int64 [bs, N], the target's token at every node.
        seq_lens: int32 or int64 [bs], committed tokens per request.
        slots: int64 [bs, N], the KV slot of every node.

    Returns:
        `CommitPlan`.
    """
    bs, nodes = choices.shape
    places = walk.accept_index.shape[1]
    place = torch.arange(places, device=choices.device)
    accepted = walk.accept_index >= 0
    path = torch.where(accepted, walk.accept_index, place)
    tokens = torch.where(accepted, choices.gather(1, path), 0)
    first_row = torch.arange(0, bs * nodes, nodes, device=choices.device)[:, None]
    accept_lens = (walk.num_accepted_drafts + 1).to(torch.int32)
    return CommitPlan(
        next_tokens=torch.nn.functional.pad(tokens, (0, nodes - places)),
        accept_lens=accept_lens,
        new_seq_lens=seq_lens + accept_lens,
        rows=path + first_row,
        kv_from=slots.gather(1, path),
        kv_to=slots[:, :places].contiguous(),
        positions=seq_lens[:, None].to(torch.int64) + place,
    )


def sample_choices(probs: torch.Tensor, coins: torch.Tensor) -> torch.Tensor:
    """One independent draw per row by inverting its distribution function, without a host synchronisation.

    A token of probability zero is never drawn: not by a coin of exactly 0.0, nor by one so close to 1 that
    it lies above the rounded sum (then the last token of positive probability is drawn).

    Args:
        probs: float32 [R, V], >= 0, each row with a positive sum; it need not be 1, the coin is scaled.
        coins: float32 [R], uniform in [0, 1), same device.

    Returns:
        int64 [R], token ids.
    """
    possible = probs > 0
    # float64, since a float32 sum over 150,000 tokens loses the tail.
    cumulative = probs.to(torch.float64).cumsum(-1)
    threshold = coins.to(torch.float64)[:, None] * cumulative[:, -1:]
    # `>`, not `>=`: a coin of 0.0 must pass over leading zeros. `possible` as well, because a parallel scan
    # may round differently at a token that adds nothing.
    hit = (cumulative > threshold) & possible
    drawn = hit.to(torch.uint8).argmax(-1)
    last = probs.shape[-1] - 1 - possible.flip(-1).to(torch.uint8).argmax(-1)
    return torch.where(hit.any(-1), drawn, last)


def greedy_choices(logits: torch.Tensor) -> torch.Tensor:
    """The target's greedy choice: the first maximum along the last dimension.

    Args:
        logits: float [..., V].

    Returns:
        int64 [...], token ids.
    """
    return logits.argmax(-1)


def _check_budget(budget: int) -> None:
    if budget < 1:
        raise ValueError(f"budget must be at least 1, got {budget}.")


def _check_candidates(root_tokens: torch.Tensor, candidate_ids: torch.Tensor, candidate_logprobs: torch.Tensor) -> None:
    for name, x, dtype, dims, shape in (
        ("root_tokens", root_tokens, torch.int64, 1, "[bs]"),
        ("candidate_ids", candidate_ids, torch.int64, 3, "[bs, D-1, K]"),
        ("candidate_logprobs", candidate_logprobs, torch.float32, 3, "[bs, D-1, K]"),
    ):
        if x.dtype != dtype:
            raise ValueError(f"{name} must be {dtype}, got {x.dtype}.")
        if x.dim() != dims:
            raise ValueError(f"{name} must have the shape {shape}, got {list(x.shape)}.")
        if x.device != candidate_ids.device:
            raise ValueError(f"{name} must be on {candidate_ids.device} like candidate_ids, got {x.device}.")
    if candidate_logprobs.shape != candidate_ids.shape:
        raise ValueError(
            f"candidate_logprobs must have the shape of candidate_ids, {list(candidate_ids.shape)}, "
            f"got {list(candidate_logprobs.shape)}."
        )
    if min(candidate_ids.shape[1:]) < 1:
        raise ValueError(
            f"candidate_ids must have at least one position and one candidate, got {list(candidate_ids.shape)}."
        )
    if root_tokens.shape[0] != candidate_ids.shape[0]:
        raise ValueError(
            f"root_tokens must have one token per request, {candidate_ids.shape[0]}, got {root_tokens.shape[0]}."
        )


def _check_logprob_values(logprobs: torch.Tensor) -> None:
    nans = int(torch.isnan(logprobs).sum())
    if nans:
        raise ValueError(f"candidate_logprobs must not be NaN, got {nans} NaN of {logprobs.numel()} values.")
    positives = int((logprobs > 0).sum())
    if positives:
        raise ValueError(
            f"candidate_logprobs must be at most 0, got {positives} positive values, the largest "
            f"{float(logprobs.max())}."
        )
    rising = int((logprobs[..., 1:] > logprobs[..., :-1]).sum())
    if rising:
        raise ValueError(
            f"candidate_logprobs must be sorted best first (non-increasing along the last dimension), "
            f"got {rising} rising steps."
        )
