"""Compare tree rules on recorded drafts: committed tokens per round, on a CPU, without any model.

A recording holds greedy answers of a target and, at every position of every answer, the drafter's 16
likeliest tokens for each block position. Under greedy decoding the target's choice at a node is a recorded
token as long as the path to it is the recorded text, so replaying the answers through the production tree
builder gives exactly the rounds that serving would take.

    python benchmarks/recorded_drafts.py --data tests/data/recorded-drafts-sample.npz --budgets 7 15 31 63
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

_UTILS = Path(__file__).resolve().parents[1] / "python/sglang/srt/speculative/ddtree_utils.py"
# A walk never matches it: what the target would say beyond the recorded answer is unknown.
_NO_TOKEN = -1
# Rows built at a time. The dense masks take chunk * (budget + 1)^2 bytes several times over.
_CHUNK = 512


def _load_utils() -> ModuleType:
    # By path: the algorithm needs no SGLang, and so this benchmark does not either.
    if "ddtree_utils" not in sys.modules:
        spec = importlib.util.spec_from_file_location("ddtree_utils", _UTILS)
        assert spec is not None and spec.loader is not None, f"no module at {_UTILS}"
        module = importlib.util.module_from_spec(spec)
        sys.modules["ddtree_utils"] = module
        spec.loader.exec_module(module)
    return sys.modules["ddtree_utils"]


ddtree_utils = _load_utils()


@dataclass(frozen=True)
class Recorded:
    """Recorded drafts of a number of prompts, one after another.

    A prompt has answer length - 1 rows: row i drafts behind answer token i (prefill gives token 0), and block
    position d of it should predict answer token i + d.

    Attributes:
        top_ids: uint16 [rows, D-1, 16], likeliest tokens per block position, best first.
        top_lp: float16 [rows, D-1, 16], their natural-log probabilities over the whole vocabulary.
        ids: uint16 [tokens], prompt and answer tokens of every prompt, concatenated.
        lens: int [prompts], tokens per prompt, its answer counted.
        prompt_lens: int [prompts], tokens of the prompt alone.
        sets: int [prompts], index into `names`.
        src: int [prompts], row in the set.
        names: the sets' names.
    """

    top_ids: np.ndarray
    top_lp: np.ndarray
    ids: np.ndarray
    lens: np.ndarray
    prompt_lens: np.ndarray
    sets: np.ndarray
    src: np.ndarray
    names: list[str]

    @property
    def rows(self) -> np.ndarray:
        """int64 [prompts], rows per prompt."""
        return self.lens.astype(np.int64) - self.prompt_lens - 1


def load(path: str | Path) -> Recorded:
    """Read a recording: a folder with `top16.npz` and `meta.npz`, or one npz that `save_sample` wrote."""
    path = Path(path)
    if path.is_dir():
        meta, top = np.load(path / "meta.npz"), np.load(path / "top16.npz")
        top_ids, top_lp = top["ids"], top["lp"]
    else:
        meta = np.load(path)
        top_ids, top_lp = meta["top16_ids"], meta["top16_lp"]
    return Recorded(
        top_ids=top_ids,
        top_lp=top_lp,
        ids=meta["ids"],
        lens=meta["lens"],
        prompt_lens=meta["P"],
        sets=meta["g"],
        src=meta["src"],
        names=[str(name) for name in meta["names"]],
    )


def save_sample(recorded: Recorded, out: str | Path, prompts: int, seed: int) -> None:
    """Write a random choice of prompts, as equal in number per set as possible, to one compressed npz.

    Keys are those of the full recording; `ids` and `lp` of its `top16.npz` become `top16_ids` and `top16_lp`,
    because `meta.npz` has an `ids` as well.
    """
    rng = np.random.default_rng(seed)
    sets = len(recorded.names)
    chosen: list[int] = []
    for g in range(sets):
        count = prompts // sets + (g < prompts % sets)
        members = np.flatnonzero(recorded.sets == g)
        chosen += sorted(rng.choice(members, size=min(count, len(members)), replace=False).tolist())
    token_begin = np.concatenate([[0], np.cumsum(recorded.lens, dtype=np.int64)])
    row_begin = np.concatenate([[0], np.cumsum(recorded.rows)])
    tokens = np.concatenate([np.arange(token_begin[p], token_begin[p + 1]) for p in chosen])
    rows = np.concatenate([np.arange(row_begin[p], row_begin[p + 1]) for p in chosen])
    np.savez_compressed(
        out,
        top16_ids=recorded.top_ids[rows],
        top16_lp=recorded.top_lp[rows],
        ids=recorded.ids[tokens],
        lens=recorded.lens[chosen],
        P=recorded.prompt_lens[chosen],
        g=recorded.sets[chosen],
        src=recorded.src[chosen],
        names=np.array(recorded.names),
    )


def _targets(recorded: Recorded) -> tuple[np.ndarray, np.ndarray]:
    """The roots, int64 [rows], and the tokens that block positions 1..D should predict, int64 [rows, D]."""
    width = recorded.top_ids.shape[1] + 1
    roots, targets = [], []
    begin = 0
    for length, prompt_len, rows in zip(recorded.lens, recorded.prompt_lens, recorded.rows, strict=True):
        answer = recorded.ids[begin + prompt_len : begin + length].astype(np.int64)
        begin += int(length)
        padded = np.concatenate([answer, np.full(width, _NO_TOKEN)])
        roots.append(answer[:rows])
        targets.append(np.lib.stride_tricks.sliding_window_view(padded[1:], width)[:rows])
    return np.concatenate(roots), np.concatenate(targets)


def accepted_per_row(recorded: Recorded, budget: int, topk_cap: int) -> np.ndarray:
    """Drafted tokens that a round starting at each row would accept, int64 [rows]."""
    roots, targets = (torch.from_numpy(x) for x in _targets(recorded))
    topk = min(topk_cap, budget)
    depth = recorded.top_ids.shape[1]
    accepted = []
    for begin in range(0, len(roots), _CHUNK):
        rows = slice(begin, begin + _CHUNK)
        tree = ddtree_utils.build_trees(
            roots[rows],
            torch.from_numpy(recorded.top_ids[rows, :, :topk].astype(np.int64)),
            torch.from_numpy(recorded.top_lp[rows, :, :topk].astype(np.float32)),
            budget,
        )
        # On the recorded path the target's choice at a node depends on its depth alone; off it no walk comes.
        choices = targets[rows].gather(1, tree.depths)
        walk = ddtree_utils.walk_trees(tree.tokens, tree.parents, choices, depth)
        accepted.append(walk.num_accepted_drafts.numpy())
    return np.concatenate(accepted)


def rounds_per_prompt(recorded: Recorded, accepted: np.ndarray) -> np.ndarray:
    """Rounds that each answer takes, int64 [prompts], given the drafts accepted at every row."""
    rounds = []
    begin = 0
    for rows in recorded.rows:
        row, count = 0, 0
        while row < rows:
            row += int(accepted[begin + row]) + 1
            count += 1
        rounds.append(count)
        begin += int(rows)
    return np.array(rounds)


def committed_tokens_per_round(recorded: Recorded, budget: int, topk_cap: int, chain: bool = False) -> dict[str, float]:
    """Committed tokens per round (accepted drafts and the bonus), per set and for "all".

    Args:
        recorded: what `load` gives.
        budget: drafted nodes per round, the root not counted.
        topk_cap: candidates per position; the tree uses min(topk_cap, budget).
        chain: draft only the likeliest token at each of the first `budget` positions, as DFLASH does.

    Returns:
        Set name, or "all", to the tokens of all its answers (the first one of each, which prefill gives, not
        counted) divided by the rounds they take.
    """
    rounds = rounds_per_prompt(recorded, accepted_per_row(recorded, budget, 1 if chain else topk_cap))
    result = {}
    for g, name in enumerate(recorded.names):
        members = recorded.sets == g
        result[name] = float(recorded.rows[members].sum() / rounds[members].sum())
    result["all"] = float(recorded.rows.sum() / rounds.sum())
    return result


def markdown_table(recorded: Recorded, budgets: list[int], topk_cap: int) -> str:
    """The chain and each budget's tree as a Markdown table of committed tokens per round."""
    columns = [*recorded.names, "all"]
    depth = recorded.top_ids.shape[1]
    lines = [
        f"| committed tokens per round | {' | '.join(columns)} |",
        f"|---|{'---|' * len(columns)}",
    ]
    table = [(f"chain, {depth} drafts", committed_tokens_per_round(recorded, depth, 1, chain=True))]
    for budget in budgets:
        label = f"tree B={budget}, K={min(topk_cap, budget)}"
        table.append((label, committed_tokens_per_round(recorded, budget, topk_cap)))
    for label, row in table:
        lines.append(f"| {label} | {' | '.join(f'{row[column]:.3f}' for column in columns)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder with top16.npz and meta.npz, or a sample's npz")
    parser.add_argument("--budgets", type=int, nargs="+", default=[7, 15, 31, 63])
    parser.add_argument("--topk-cap", type=int, default=8)
    parser.add_argument("--make-sample", metavar="OUT", help="write a sample of --data here instead")
    parser.add_argument("--prompts", type=int, default=40, help="prompts in the sample")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample's choice")
    args = parser.parse_args()

    recorded = load(args.data)
    if args.make_sample:
        save_sample(recorded, args.make_sample, args.prompts, args.seed)
        print(f"{args.make_sample}: {Path(args.make_sample).stat().st_size:,} bytes")
    else:
        print(markdown_table(recorded, args.budgets, args.topk_cap))


if __name__ == "__main__":
    main()
