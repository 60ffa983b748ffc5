"""Microseconds to build, compile and walk the draft trees of one round: kernels, vectorised torch, host heap.

    python benchmarks/bench_tree.py --out results/bench_tree

Needs a CUDA device. Writes OUT.csv, OUT.md and, where matplotlib is installed, OUT.png. Before anything is timed
the three ways must agree on every field of every tree and walk, or the program stops with exit code 1.

A round is: build the trees, link them, ancestor bits, positions, then the walk along given choices. Times are between
CUDA events: a sample is `--inner` rounds, replayed as one CUDA graph (what serving does) or launched one by one
("eager", which is mostly the host's time to launch), divided by their number. The host heap waits for the
candidates, builds with a heap in Python and uploads its trees, so its sample is one round. Caches are warm unless
`--flush-l2` clears them before every sample (then a sample is one round).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from kernel_bench import (
    L2_FLUSH_BYTES,
    capture,
    conditions,
    event_times,
    load,
    need_gpu,
    spread,
    write_results,
)

HEAP_SECONDS = 3.0


PACKAGE = "sglang.srt.speculative"
# By path and under the names that they import each other by: the trees need no SGLang, nor does this.
utils, kernels = (
    load(f"{PACKAGE}.{name}", f"python/sglang/srt/speculative/{name}.py") for name in ("ddtree_utils", "ddtree_kernels")
)


@dataclass(frozen=True)
class Inputs:
    """What a round starts from, all on one device; shapes as in `ddtree_utils`."""

    roots: torch.Tensor
    ids: torch.Tensor
    logprobs: torch.Tensor
    seq_lens: torch.Tensor
    choices: torch.Tensor
    budget: int

    @property
    def max_depth(self) -> int:
        return self.ids.shape[1]


@dataclass(frozen=True)
class Row:
    """One line of the results; times in microseconds per round of the whole batch."""

    way: str
    mode: str
    stage: str
    requests: int
    budget: int
    median_us: float
    p20_us: float
    p80_us: float
    samples: int


def make_inputs(requests: int, budget: int, block_size: int, topk: int, device: str) -> Inputs:
    """Seeded drafts that are confident at the front, and choices that follow the likeliest child 3 times in 4."""
    generator = torch.Generator().manual_seed(1000 * requests + budget)
    levels = block_size - 1
    vocabulary = 4 * topk
    sharpness = torch.linspace(4.0, 1.0, levels)[None, :, None]
    logits = torch.randn(requests, levels, vocabulary, generator=generator) * sharpness
    logprobs, ids = torch.log_softmax(logits, -1).topk(topk, dim=-1)
    roots = torch.zeros(requests, dtype=torch.int64)
    tree = utils.build_trees(roots, ids, logprobs, budget)
    best = torch.cat([ids[:, :, 0], roots[:, None]], dim=1).gather(1, tree.depths)
    follow = torch.rand(tree.depths.shape, generator=generator) < 0.75
    return Inputs(
        roots=roots.to(device),
        ids=ids.to(device),
        logprobs=logprobs.to(device),
        seq_lens=torch.randint(1, 4096, (requests,), generator=generator).to(device),
        choices=torch.where(follow, best, torch.full_like(best, vocabulary)).to(device),
        budget=budget,
    )


def torch_build(x: Inputs):
    tree = utils.build_trees(x.roots, x.ids, x.logprobs, x.budget, validate=False)
    return tree, utils.bit_mask(tree.visible), utils.tree_positions(tree.depths, x.seq_lens)


def torch_round(x: Inputs):
    tree, bits, positions = torch_build(x)
    walk = utils.walk_trees(tree.tokens, tree.parents, x.choices, x.max_depth)
    return tree, bits, positions, walk, x.seq_lens + walk.num_accepted_drafts + 1


def heap_round(x: Inputs):
    """Candidates to the host, a heap per request, the trees back to the device and compiled there."""
    device, n = x.ids.device, x.budget + 1
    roots, ids, logprobs = x.roots.tolist(), x.ids.tolist(), x.logprobs.tolist()
    trees = [utils.build_tree_heap(*request, x.budget) for request in zip(roots, ids, logprobs, strict=True)]

    def upload(name: str, padding: float, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        rows = [getattr(tree, name) for tree in trees]
        return torch.tensor([row + [padding] * (n - len(row)) for row in rows], dtype=dtype).to(device)

    parents, depths = upload("parents", -1), upload("depths", 0)
    first_child, next_sibling = utils.link_children(parents)
    visible = utils.ancestor_mask(parents, x.max_depth)
    tree = utils.DraftTree(
        tokens=upload("tokens", 0),
        parents=parents,
        depths=depths,
        scores=upload("scores", float("-inf"), torch.float32),
        ranks=upload("ranks", -1),
        num_nodes=torch.tensor([len(tree.tokens) for tree in trees]).to(device),
        first_child=first_child,
        next_sibling=next_sibling,
        visible=visible,
    )
    walk = utils.walk_trees(tree.tokens, parents, x.choices, x.max_depth)
    positions = utils.tree_positions(depths, x.seq_lens)
    return tree, utils.bit_mask(visible), positions, walk, x.seq_lens + walk.num_accepted_drafts + 1


class KernelRound:
    """The kernels over fixed buffers."""

    def __init__(self, x: Inputs):
        self.x = x
        bs, device = x.ids.shape[0], x.ids.device
        self.tree = kernels.allocate_tree(bs, x.budget, device)
        self.walk_out = kernels.allocate_walk(bs, x.budget + 1, x.max_depth, device)

    def build(self) -> None:
        x = self.x
        kernels.build_trees(x.roots, x.ids, x.logprobs, x.budget, seq_lens=x.seq_lens, out=self.tree)

    def walk(self) -> None:
        x, tree = self.x, self.tree
        kernels.walk_trees(tree.tokens, tree.parents, x.choices, x.max_depth, seq_lens=x.seq_lens, out=self.walk_out)

    def run(self) -> None:
        self.build()
        self.walk()


def check_agreement(x: Inputs) -> None:
    """Every field of the three ways' trees and walks, bit for bit.

    Raises:
        SystemExit: they differ; the message names the field.
    """
    fixed = KernelRound(x)
    fixed.run()
    expected = torch_round(x)
    for way, (tree, bits, positions, walk, new_lens) in (
        ("host heap", heap_round(x)),
        (
            "kernels",
            (
                fixed.tree,
                fixed.tree.ancestor_bits,
                fixed.tree.positions,
                fixed.walk_out,
                fixed.walk_out.new_seq_lens,
            ),
        ),
    ):
        pairs = [("ancestor bits", bits, expected[1]), ("positions", positions, expected[2])]
        pairs += [("new_seq_lens", new_lens, expected[4])]
        for got, reference in ((tree, expected[0]), (walk, expected[3])):
            names = [f.name for f in fields(reference) if getattr(got, f.name) is not None]
            pairs += [(name, getattr(got, name), getattr(reference, name)) for name in names]
        for name, got, reference in pairs:
            if not torch.equal(got, reference):
                raise SystemExit(
                    f"{way} and torch differ in {name} at {x.ids.shape[0]} requests, budget {x.budget}; nothing timed."
                )


def measure(run: Callable[[], object], samples: int, per_sample: int, flush: torch.Tensor | None) -> list[float]:
    """Microseconds per round of each sample, in ascending order; stops early at HEAP_SECONDS if it is that slow."""
    warm_until = time.perf_counter() + 0.2
    for i in range(20):
        run()
        # Twenty rounds of the host heap would take a minute.
        if i >= 1 and time.perf_counter() > warm_until:
            break
    torch.cuda.synchronize()
    begin = time.perf_counter()
    times = event_times(run, samples, flush, lambda taken: taken >= 5 and time.perf_counter() - begin > HEAP_SECONDS)
    return [us / per_sample for us in times]


def summary(way: str, mode: str, stage: str, x: Inputs, times: list[float]) -> Row:
    return Row(way, mode, stage, x.ids.shape[0], x.budget, *spread(times), len(times))


def bench(x: Inputs, args: argparse.Namespace, flush: torch.Tensor | None) -> list[Row]:
    """All ways, modes and stages on one set of inputs."""
    inner = 1 if flush is not None else args.inner
    fixed = KernelRound(x)
    rows = []
    for way, stage, run in (
        ("kernels", "round", fixed.run),
        ("kernels", "build", fixed.build),
        ("kernels", "walk", fixed.walk),
        ("torch", "round", lambda: torch_round(x)),
        ("torch", "build", lambda: torch_build(x)),
    ):

        def several(run: Callable[[], object] = run) -> None:
            for _ in range(inner):
                run()

        graph = capture(several, run, 3)
        rows.append(summary(way, "graph", stage, x, measure(graph.replay, args.samples, inner, flush)))
        del graph
        if stage == "round":
            rows.append(summary(way, "eager", stage, x, measure(several, args.samples, inner, flush)))
    rows.append(
        summary("host heap", "eager", "round", x, measure(lambda: heap_round(x), min(args.samples, 50), 1, flush))
    )
    return rows


def markdown(rows: list[Row], head: str) -> str:
    lines = [
        head,
        "",
        "Microseconds per round of the whole batch, median (20th to 80th percentile).",
        "",
        "| requests | budget | way | launched as | stage | us | samples |",
        "|---:|---:|---|---|---|---:|---:|",
    ]
    for row in rows:
        lines.append(
            f"| {row.requests} | {row.budget} | {row.way} | {row.mode} | {row.stage} | "
            f"{row.median_us:.1f} ({row.p20_us:.1f} to {row.p80_us:.1f}) | {row.samples} |"
        )
    return "\n".join(lines) + "\n"


def plot(rows: list[Row], path: Path, title: str) -> bool:
    """One panel per budget: microseconds over requests. False if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    budgets = sorted({row.budget for row in rows})
    figure, axes = plt.subplots(1, len(budgets), figsize=(4.5 * len(budgets), 4), sharey=True, squeeze=False)
    for axis, budget in zip(axes[0], budgets, strict=True):
        for way, mode in (("kernels", "graph"), ("torch", "graph"), ("host heap", "eager")):
            line = [r for r in rows if (r.way, r.mode, r.stage, r.budget) == (way, mode, "round", budget)]
            axis.plot([r.requests for r in line], [r.median_us for r in line], marker="o", label=f"{way} ({mode})")
            axis.fill_between([r.requests for r in line], [r.p20_us for r in line], [r.p80_us for r in line], alpha=0.2)
        axis.set(xscale="log", yscale="log", xlabel="requests", title=f"budget {budget}")
        axis.set_xticks(sorted({r.requests for r in rows}), [str(x) for x in sorted({r.requests for r in rows})])
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("microseconds per round")
    axes[0][-1].legend()
    figure.suptitle(title, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 8, 32, 128])
    parser.add_argument("--budgets", nargs="+", type=int, default=[15, 63, 255])
    parser.add_argument("--block-size", type=int, default=16, help="D, the root's position counted")
    parser.add_argument("--topk", type=int, default=8, help="K, candidates per position")
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--inner", type=int, default=10, help="rounds per sample")
    parser.add_argument("--flush-l2", action="store_true", help="clear the L2 cache before every sample")
    parser.add_argument("--out", type=Path, required=True, help="results are OUT.csv, OUT.md and OUT.png")
    args = parser.parse_args()
    need_gpu("bench_tree.py")

    grid = [
        make_inputs(requests, budget, args.block_size, args.topk, "cuda")
        for budget in args.budgets
        for requests in args.requests
    ]
    for x in grid:
        check_agreement(x)
    flush = torch.empty(L2_FLUSH_BYTES, dtype=torch.uint8, device="cuda") if args.flush_l2 else None
    rows = [row for x in grid for row in bench(x, args, flush)]

    write_results(args.out, Row, rows, markdown(rows, conditions("bench_tree.py")), plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
