"""Greedy verification: walk each drafted tree along the target's own choices."""

import torch


def verify_tree_greedy_cpu(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Follow the child whose token the target chose, as long as there is one.

    candidates: int64 [bs, N]; drafted tokens, node 0 is the root.
    retrive_index: int64 [bs, N]; a node's number in the whole batch. retrive_next_token (first child) and
    retrive_next_sibling: int64 [bs, N]; numbers within the request, -1: none.
    target_predict: int [bs, N] or flat; the target's choice after each node, addressed by ``retrive_index``.

    Mutates
    predicts: int32 [bs * N]; the target's choice at the visited nodes only.
    accept_index: int32 [bs, depth + 1]; visited nodes by ``retrive_index``, the root first; the rest keeps
        the caller's -1.
    accept_token_num: int32 [bs]; accepted drafted nodes, neither root nor bonus token counted.
    """
    most_visited = accept_index.shape[1]
    flat_target = target_predict.reshape(-1)
    choices = flat_target.tolist()
    requests = zip(
        candidates.tolist(),
        retrive_index.tolist(),
        retrive_next_token.tolist(),
        retrive_next_sibling.tolist(),
        strict=True,
    )
    for b, (tokens, numbers, first_child, next_sibling) in enumerate(requests):
        node: int = 0
        visited = [numbers[0]]
        while len(visited) < most_visited:
            child = first_child[node]
            while child != -1 and tokens[child] != choices[visited[-1]]:
                child = next_sibling[child]
            if child == -1:
                break
            node = child
            visited.append(numbers[node])
        path = torch.tensor(visited)
        predicts[path] = flat_target[path].to(predicts.dtype)
        accept_index[b, : len(visited)] = path.to(accept_index.dtype)
        accept_token_num[b] = len(visited) - 1
