"""Drafted trees as EAGLE and NGRAM describe them, turned into links, positions and a mask.

Node 0 is the root, the last committed token. Links are numbers within the request: a node's first child and
its next sibling, -1: none. ``retrieve_index`` numbers the nodes of the whole batch.
"""

import torch

FULL_MASK = 0
QLEN_ONLY = 1


def build_tree_kernel_efficient_cpu(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    verified_seq_len: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Compile the trees that EAGLE selected, N = ``draft_token_num`` nodes each, the root among them.

    parent_list: int64 [bs, >= expanded beams]; entry i names the candidate that beam i extends.
    selected_index: int64 [bs, N - 1]; candidate numbers of nodes 1..N-1, ascending. Candidate c belongs to
        beam c // topk, and beam 0 extends the root.
    verified_seq_len: int [bs]; committed tokens.
    tree_mask: bool, flat; True: the row may attend the column. QLEN_ONLY: [bs, N, N]. FULL_MASK: for each
        request [N, verified_seq_len + N], of which only the last N columns are written.
    positions: int64 [bs * N]; committed tokens + depth in the tree.
    retrive_index, retrive_next_token, retrive_next_sibling: int64 [bs, N]; the caller fills them with -1.
    depth: the most edges between a node and the root that are followed.
    Mutates tree_mask, positions and the three retrive tensors.
    """
    if tree_mask_mode not in (FULL_MASK, QLEN_ONLY):
        raise NotImplementedError(
            "this machine has no GPU: build_tree_kernel_efficient with a bit-packed mask "
            f"(tree_mask_mode={int(tree_mask_mode)}) has no CPU stand-in"
        )
    width = draft_token_num
    mask_offset = 0
    for b, seq_len in enumerate(verified_seq_len.tolist()):
        parents = _selected_parents(parent_list[b].tolist(), selected_index[b, : width - 1].tolist(), topk)
        first_child, next_sibling = _links(parents)
        visible, depths = _ancestors(parents, depth)

        retrive_index[b] = torch.arange(b * width, (b + 1) * width)
        _write_links(retrive_next_token[b], first_child)
        _write_links(retrive_next_sibling[b], next_sibling)
        positions[b * width : (b + 1) * width] = seq_len + torch.tensor(depths)

        columns = width + (seq_len if tree_mask_mode == FULL_MASK else 0)
        block = tree_mask[mask_offset : mask_offset + width * columns].view(width, columns)
        block[:, columns - width :] = visible.to(tree_mask.dtype)
        mask_offset += width * columns


def reconstruct_indices_from_tree_mask(
    tree_mask: torch.Tensor,
    verified_seq_len: torch.Tensor,
    positions: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Recover positions and links from an ancestor mask; parents stand before their children.

    tree_mask: bool, flat [bs * N * N]; True: the column is an ancestor of the row, or the row itself.
    Mutates positions (int64 [bs * N]) and the three retrive tensors (int64 [bs, N]), every entry.
    """
    width = draft_token_num
    earlier = torch.ones(width, width, dtype=torch.bool).tril(-1)
    visible = tree_mask.reshape(-1)[: batch_size * width * width].view(batch_size, width, width) & earlier
    depths = visible.sum(-1)
    # The nearest ancestor is the last one; a row without any has none.
    parents = torch.where(visible, torch.arange(width), -1).amax(-1)

    positions.view(-1)[: batch_size * width] = (verified_seq_len[:batch_size, None] + depths).reshape(-1)
    retrive_index.view(-1)[: batch_size * width] = torch.arange(batch_size * width)
    for b in range(batch_size):
        first_child, next_sibling = _links([p if p >= 0 else None for p in parents[b].tolist()])
        retrive_next_token[b, :width] = torch.tensor(first_child)
        retrive_next_sibling[b, :width] = torch.tensor(next_sibling)


def _selected_parents(beam_candidates: list[int], selected: list[int], topk: int) -> list[int | None]:
    """Each node's parent; None for the root and for a node whose parent was not selected."""
    node_of: dict[int, int] = {}
    for node, candidate in enumerate(selected, start=1):
        node_of.setdefault(candidate, node)
    beams = (candidate // topk for candidate in selected)
    return [None, *(0 if beam == 0 else node_of.get(beam_candidates[beam]) for beam in beams)]


def _links(parents: list[int | None]) -> tuple[list[int], list[int]]:
    """First child and next sibling of every node, siblings ascending, -1: none."""
    first_child = [-1] * len(parents)
    next_sibling = [-1] * len(parents)
    for node in reversed(range(1, len(parents))):
        parent = parents[node]
        if parent is not None:
            next_sibling[node] = first_child[parent]
            first_child[parent] = node
    return first_child, next_sibling


def _ancestors(parents: list[int | None], depth: int) -> tuple[torch.Tensor, list[int]]:
    """Ancestor-or-self mask (bool [N, N]; the root's column is True everywhere) and depths."""
    visible = torch.eye(len(parents), dtype=torch.bool)
    visible[:, 0] = True
    depths = [0] * len(parents)
    for row in range(1, len(parents)):
        node: int | None = row
        while node and depths[row] < depth:
            visible[row, node] = True
            depths[row] += 1
            node = parents[node]
    return visible, depths


def _write_links(out: torch.Tensor, links: list[int]) -> None:
    """Write the links that exist; where there is none, ``out`` keeps the caller's -1."""
    linked = torch.tensor(links)
    out.copy_(torch.where(linked >= 0, linked, out))
