"""DDTree from its definition alone: batch 1, float32, CPU, greedy, with nothing but transformers and torch.

What serves in SGLang is compared with this. So it shares no code with it: the drafter, the tree, the mask and
the walk are written again here, the simplest way that is right, and no attempt at speed is made.

- The target is any transformers causal language model that returns `hidden_states` (Llama, Qwen3).
- The drafter is read from a DFlash checkpoint folder (config.json, *.safetensors).
- Every token's key and value in the target's cache come from a plain causal forward: a round verifies its
  tree, drops all that it put into the cache, and feeds the accepted tokens again.

One round, with L committed tokens before the root (the root is the last committed token, at position L):
    draft    block [root, MASK x (D-1)] at positions L..L+D-1 -> log-probabilities for block positions 1..D-1
    tree     the `budget` likeliest nodes of at most D-1 levels, best-first
    verify   one target forward over root and nodes, each seeing the prefix, its ancestors and itself
    walk     from the root to the child whose token is the target's argmax, as long as there is one
    commit   the accepted drafts and one more token, the target's choice where the walk stopped: the next root
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import DynamicCache, PreTrainedModel


@dataclass
class OracleResult:
    """What one request generated.

    token_ids: the new tokens, cut after the first of `eos_ids` (which is kept) and at `max_new_tokens`.
    committed_per_round: for each verify round, accepted drafts + 1, before any such cut. The first token
        comes from the prefill and belongs to no round, so 1 + sum(committed_per_round) >= len(token_ids).
        tau is the mean of this list.
    """

    token_ids: list[int]
    committed_per_round: list[int]


# --- the drafter ------------------------------------------------------------------------------------------


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x: float32 [..., n], weight: float32 [n]."""
    return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps) * weight


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """RoPE that pairs channel i with channel i + head_dim / 2. x: [heads, tokens, head_dim]."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = positions.to(torch.float32)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class DFlashDrafter:
    """A DFlash drafter and its key/value cache for one request.

    It has no embedding and no output head: both are the target's. Committed tokens reach it only as keys and
    values made from the target's hidden states; of its own layers, only the block passes through them.
    """

    def __init__(self, config: dict, weights: dict[str, torch.Tensor], target: PreTrainedModel) -> None:
        dflash = config["dflash_config"]
        unsupported = {
            "layer_types": set(config.get("layer_types") or ["full_attention"]) != {"full_attention"},
            "is_causal": bool(config.get("is_causal")),
            "attention_bias": bool(config.get("attention_bias")),
            "rope_scaling": config.get("rope_scaling") is not None,
        }
        if any(unsupported.values()):
            names = ", ".join(name for name, found in unsupported.items() if found)
            raise ValueError(f"the oracle's drafter does not know this checkpoint's {names}")
        self.num_layers: int = config["num_hidden_layers"]
        self.heads: int = config["num_attention_heads"]
        self.kv_heads: int = config["num_key_value_heads"]
        self.head_dim: int = config["head_dim"]
        self.eps: float = config["rms_norm_eps"]
        self.theta: float = (config.get("rope_parameters") or config)["rope_theta"]
        self.block_size: int = dflash.get("block_size") or config["block_size"]
        self.mask_token_id: int = dflash["mask_token_id"]
        self.target_layer_ids: list[int] = dflash["target_layer_ids"]
        # The last layer's output is not among the target's hidden_states: that entry has the final norm.
        last = target.config.num_hidden_layers - 1
        if not all(0 <= i < last for i in self.target_layer_ids):
            raise ValueError(f"target_layer_ids must be in 0..{last - 1}, got {self.target_layer_ids}")
        # Some checkpoints prefix every name with "model.".
        self.weights = {name.removeprefix("model."): w.to(torch.float32) for name, w in weights.items()}
        self.embed = target.get_input_embeddings()
        self.head = target.get_output_embeddings()
        self.reset()

    def reset(self) -> None:
        """Forget the request: empty the cache of every layer."""
        empty = torch.empty(self.kv_heads, 0, self.head_dim)
        self.keys, self.values = [empty] * self.num_layers, [empty] * self.num_layers

    def project(self, layer: int, name: str, x: torch.Tensor, heads: int) -> torch.Tensor:
        """One of q_proj, k_proj, v_proj. x: [tokens, hidden] -> [heads, tokens, head_dim]."""
        y = F.linear(x, self.weights[f"layers.{layer}.self_attn.{name}.weight"])
        return y.view(-1, heads, self.head_dim).transpose(0, 1)

    def keys_values(self, layer: int, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (normalised per head, then rotated) and values, each [kv_heads, tokens, head_dim].

        x: [tokens, hidden]; positions: int64 [tokens].
        """
        k = self.project(layer, "k_proj", x, self.kv_heads)
        k = rms_norm(k, self.weights[f"layers.{layer}.self_attn.k_norm.weight"], self.eps)
        return rotate(k, positions, self.theta), self.project(layer, "v_proj", x, self.kv_heads)

    def append_context(self, hidden_states: tuple[torch.Tensor, ...]) -> None:
        """Add committed tokens to the cache.

        hidden_states: as a transformers model returns them for these tokens, each float32
            [1, tokens, hidden]. Entry 0 is the embedding, so the output of layer i is entry i + 1.
        """
        features = torch.cat([hidden_states[i + 1][0] for i in self.target_layer_ids], dim=-1)
        context = F.linear(features, self.weights["fc.weight"])
        context = rms_norm(context, self.weights["hidden_norm.weight"], self.eps)
        start = self.keys[0].shape[1]
        positions = torch.arange(start, start + context.shape[0])
        for layer in range(self.num_layers):
            # The context meets each layer's k_proj and v_proj as it is, without the layer's input norm.
            k, v = self.keys_values(layer, context, positions)
            self.keys[layer] = torch.cat([self.keys[layer], k], dim=1)
            self.values[layer] = torch.cat([self.values[layer], v], dim=1)

    def log_probs(self, root: int) -> torch.Tensor:
        """Draft one block after the cached context; the cache is left as it was.

        Returns float32 [D - 1, vocabulary], normalised over the vocabulary; row i: block position i + 1.
        """
        w = self.weights
        block = torch.tensor([root] + [self.mask_token_id] * (self.block_size - 1))
        start = self.keys[0].shape[1]
        positions = torch.arange(start, start + self.block_size)
        x = self.embed(block).to(torch.float32)
        for layer in range(self.num_layers):
            prefix = f"layers.{layer}."
            h = rms_norm(x, w[prefix + "input_layernorm.weight"], self.eps)
            q = self.project(layer, "q_proj", h, self.heads)
            q = rotate(rms_norm(q, w[prefix + "self_attn.q_norm.weight"], self.eps), positions, self.theta)
            k, v = self.keys_values(layer, h, positions)
            # No mask: every row of the block sees the whole context and the whole block.
            k = torch.cat([self.keys[layer], k], dim=1).repeat_interleave(self.heads // self.kv_heads, dim=0)
            v = torch.cat([self.values[layer], v], dim=1).repeat_interleave(self.heads // self.kv_heads, dim=0)
            weights = torch.softmax(q @ k.transpose(1, 2) * self.head_dim**-0.5, dim=-1)
            attended = (weights @ v).transpose(0, 1).reshape(self.block_size, -1)
            x = x + F.linear(attended, w[prefix + "self_attn.o_proj.weight"])
            h = rms_norm(x, w[prefix + "post_attention_layernorm.weight"], self.eps)
            gate = F.silu(F.linear(h, w[prefix + "mlp.gate_proj.weight"]))
            h = gate * F.linear(h, w[prefix + "mlp.up_proj.weight"])
            x = x + F.linear(h, w[prefix + "mlp.down_proj.weight"])
        # Row 0 is the root, which is known: rows 1..D-1 say what stands at their own positions.
        rows = rms_norm(x[1:], w["norm.weight"], self.eps)
        return torch.log_softmax(self.head(rows).to(torch.float32), dim=-1)


def load_drafter(path: str | Path, target: PreTrainedModel) -> DFlashDrafter:
    """Read a DFlash checkpoint folder; the drafter borrows `target`'s embedding and output head."""
    path = Path(path)
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        weights.update(load_file(file))
    return DFlashDrafter(json.loads((path / "config.json").read_text(encoding="utf-8")), weights, target)


# --- the tree ---------------------------------------------------------------------------------------------


@dataclass
class Tree:
    """Tokens, parents and depths of all nodes; node 0 is the root (parent -1), parents precede children."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]

    def add(self, token: int, parent: int) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        return len(self.tokens) - 1


def candidates(log_probs: torch.Tensor, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k best of each row, best first: (float32, int64), both [rows, k].

    Rank 0 is the first maximum, which is what DFlash drafts; other equal values may come in any order.
    """
    first = log_probs.argmax(dim=-1, keepdim=True)
    ids = log_probs.scatter(-1, first, float("inf")).topk(k, dim=-1).indices
    return log_probs.gather(-1, ids).numpy(), ids.numpy()


def best_first_tree(root: int, log_probs: torch.Tensor, budget: int, topk_cap: int) -> Tree:
    """The `budget` nodes with the highest scores, in the order in which best-first search takes them.

    log_probs: float32 [D - 1, vocabulary]. A node's score is the float32 sum of its path's log-probabilities.
    Equal scores: the shallower node, then the one whose parent was taken earlier, then the lower rank.
    """
    values, ids = candidates(log_probs, min(topk_cap, budget))
    tree = Tree([root], [-1], [0])
    scores = [np.float32(0)]
    heap: list[tuple[float, int, int, int]] = []

    def push_children(node: int) -> None:
        depth = tree.depths[node]
        if depth < len(values):
            for rank, value in enumerate(values[depth]):
                heapq.heappush(heap, (-float(scores[node] + value), depth + 1, node, rank))

    push_children(0)
    while heap and len(tree.tokens) <= budget:
        score, depth, parent, rank = heapq.heappop(heap)
        node = tree.add(int(ids[depth - 1][rank]), parent)
        scores.append(np.float32(-score))
        push_children(node)
    return tree


def chain(root: int, tokens: Iterable[int]) -> Tree:
    """The tree without branches."""
    tree = Tree([root], [-1], [0])
    for token in tokens:
        tree.add(token, len(tree.tokens) - 1)
    return tree


# --- the target -------------------------------------------------------------------------------------------


class Target:
    """A transformers model with a cache that holds committed tokens only, the root not included."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.cache = DynamicCache(config=model.config)

    @property
    def length(self) -> int:
        return self.cache.get_seq_length()

    def feed(self, tokens: list[int]) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Append tokens causally: (logits [tokens, vocabulary], hidden_states, each [1, tokens, hidden])."""
        ids = torch.tensor([tokens])
        positions = torch.arange(self.length, self.length + len(tokens))[None]
        out = self.model(input_ids=ids, position_ids=positions, past_key_values=self.cache, output_hidden_states=True)
        return out.logits[0], out.hidden_states

    def verify(self, tree: Tree) -> list[int]:
        """The target's argmax at every node of the tree, in one forward; the cache is left as it was."""
        length, n = self.length, len(tree.tokens)
        visible = torch.zeros(n, length + n, dtype=torch.bool)
        visible[:, :length] = True
        for node in range(n):
            ancestor = node
            while ancestor >= 0:
                visible[node, length + ancestor] = True
                ancestor = tree.parents[ancestor]
        mask = torch.zeros(1, 1, n, length + n).masked_fill(~visible, float("-inf"))
        out = self.model(
            input_ids=torch.tensor([tree.tokens]),
            position_ids=length + torch.tensor([tree.depths]),
            attention_mask=mask,
            past_key_values=self.cache,
        )
        self.cache.crop(length)
        assert self.length == length
        return out.logits[0].argmax(dim=-1).tolist()


def walk(tree: Tree, choices: list[int]) -> tuple[list[int], int]:
    """Follow the target's choices from the root: (accepted nodes, the choice where the walk stopped)."""
    accepted, node = [], 0
    while True:
        children = [c for c in range(len(tree.tokens)) if tree.parents[c] == node]
        matching = [c for c in children if tree.tokens[c] == choices[node]]
        if not matching:
            return accepted, choices[node]
        (node,) = matching
        accepted.append(node)


# --- generation -------------------------------------------------------------------------------------------


def truncate(tokens: list[int], max_new_tokens: int, eos_ids: Iterable[int]) -> tuple[list[int], bool]:
    """Cut after the first end-of-sequence token and at max_new_tokens: (tokens, is generation over)."""
    stops = set(eos_ids)
    for i, token in enumerate(tokens[:max_new_tokens]):
        if token in stops:
            return tokens[: i + 1], True
    return tokens[:max_new_tokens], len(tokens) >= max_new_tokens


@torch.inference_mode()
def generate_plain(
    target: PreTrainedModel, input_ids: list[int], max_new_tokens: int, eos_ids: Iterable[int] = ()
) -> list[int]:
    """Greedy decoding, one token at a time. `input_ids`: the prompt; returns the new tokens."""
    state, eos_ids = Target(target), tuple(eos_ids)
    feed, new, over = list(input_ids), [], False
    while not over:
        logits, _ = state.feed(feed)
        feed = [int(logits[-1].argmax())]
        new, over = truncate(new + feed, max_new_tokens, eos_ids)
    return new


@torch.inference_mode()
def _generate(
    target: PreTrainedModel,
    drafter: DFlashDrafter,
    input_ids: list[int],
    propose: Callable[[int, torch.Tensor], Tree],
    max_new_tokens: int,
    eos_ids: Iterable[int],
) -> OracleResult:
    """The rounds; `propose(root, log_probs)` makes the tree of one."""
    state, eos_ids = Target(target), tuple(eos_ids)
    drafter.reset()
    logits, hidden = state.feed(list(input_ids))
    drafter.append_context(hidden)
    root = int(logits[-1].argmax())
    new, over = truncate([root], max_new_tokens, eos_ids)
    committed_per_round = []
    while not over:
        tree = propose(root, drafter.log_probs(root))
        accepted, bonus = walk(tree, state.verify(tree))
        path = [tree.tokens[node] for node in accepted]
        committed_per_round.append(len(path) + 1)
        _, hidden = state.feed([root, *path])
        drafter.append_context(hidden)
        root = bonus
        new, over = truncate([*new, *path, bonus], max_new_tokens, eos_ids)
    return OracleResult(new, committed_per_round)


def generate_chain(
    target: PreTrainedModel,
    drafter: DFlashDrafter,
    input_ids: list[int],
    max_new_tokens: int,
    eos_ids: Iterable[int] = (),
    num_drafts: int | None = None,
) -> OracleResult:
    """DFlash as it is: the drafter's first choice at `num_drafts` positions (default: at all D - 1)."""
    return _generate(
        target,
        drafter,
        input_ids,
        lambda root, log_probs: chain(root, log_probs[:num_drafts].argmax(dim=-1).tolist()),
        max_new_tokens,
        eos_ids,
    )


def generate_tree(
    target: PreTrainedModel,
    drafter: DFlashDrafter,
    input_ids: list[int],
    budget: int,
    topk_cap: int,
    max_new_tokens: int,
    eos_ids: Iterable[int] = (),
) -> OracleResult:
    """DDTree: `budget` nodes a round (the root not counted), at most `topk_cap` candidates per position."""
    return _generate(
        target,
        drafter,
        input_ids,
        lambda root, log_probs: best_first_tree(root, log_probs, budget, topk_cap),
        max_new_tokens,
        eos_ids,
    )
