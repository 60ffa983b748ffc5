"""Microseconds and bandwidth of one layer's tree verify: this kernel, SGLang's Triton kernel, FlashInfer.

    python benchmarks/bench_tree_attention.py --out results/bench_tree_attention

Needs a CUDA device and SGLang. Writes OUT.csv, OUT.md and, where matplotlib is installed, OUT.png.

Ways:
    tree        `triton_tree_mask.tree_attention`: ancestor bits, prefix split among programs (merge included)
    sglang      SGLang's Triton extend kernel with a dense mask
    flashinfer  FlashInfer's paged prefill with a custom mask; left out, with the reason, where it does not run
    torch       `torch_tree_mask.tree_attention`, request by request; only where `--ways` names it

What a round does once for all layers (masks, bits, plans) is not timed. Every way must agree with attention in float32
on the first and the last request of a cell before that cell is timed, or the program stops with exit code 1.

A sample is one CUDA graph of `--layers` calls, each over a KV cache of its own, divided by their number; the L2 cache
is cleared before every sample, so every call finds its keys in memory, as a model's layers do. Bandwidth counts the
keys and values of prefix and tree, once; its share is of a copy of `--copy-gib` measured in the same run, which counts
what is read and what is written.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import astuple, dataclass
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

WAYS = ("tree", "sglang", "flashinfer", "torch")
# Bounds on |way - float32| / max |float32|: weights and results are rounded to 8 bits, products of float32 to 10.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 2e-3}


kernel = load("triton_tree_mask", "python/sglang/srt/layers/attention/triton_tree_mask.py")


@dataclass(frozen=True)
class Shape:
    """Heads and dtype of a layer."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def scaling(self) -> float:
        return self.head_dim**-0.5


@dataclass(frozen=True)
class Row:
    """One line of the results; times in microseconds per call of the whole batch, bandwidth in GB/s."""

    way: str
    requests: int
    context: int
    nodes: int
    median_us: float
    p20_us: float
    p80_us: float
    samples: int
    bandwidth_gbs: float
    share_of_copy: float
    parts_per_request: int
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def random_parents(nodes: int, rng: random.Random) -> list[int]:
    """A tree whose nodes mostly prolong a recent one, as drafts do."""
    return [-1] + [max(0, i - 1 - int(rng.expovariate(0.7))) for i in range(1, nodes)]


class Cell:
    """One batch: `requests` trees of `nodes` over contexts of one length, in scattered slots, for some layers.

    Every layer has its own cache; query, bits and slots are shared. The tree's keys lie in the cache too, where
    FlashInfer reads them.
    """

    def __init__(self, shape: Shape, requests: int, context: int, nodes: int, layers: int, device: str):
        self.shape, self.requests, self.context, self.nodes = shape, requests, context, nodes
        generator = torch.Generator(device=device).manual_seed(1000 * requests + nodes)
        rng = random.Random(nodes)

        def draw(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator, device=device).to(shape.dtype)

        def indptr(step: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.arange(requests + 1, device=device).mul(step).to(dtype)

        tokens, total = requests * nodes, requests * (context + nodes)
        self.q = draw(tokens, shape.heads, shape.head_dim)
        self.caches = [[draw(total, shape.kv_heads, shape.head_dim) for _ in "kv"] for _ in range(layers)]
        slots = torch.randperm(total, generator=generator, device=device).view(requests, context + nodes)
        self.all_slots = slots.flatten()
        self.kv_indices = slots[:, :context].flatten()
        self.tree_slots = slots[:, context:].flatten()
        self.tree_kv = [[cache[self.tree_slots] for cache in pair] for pair in self.caches]
        self.qo_indptr, self.kv_indptr = indptr(nodes, torch.int32), indptr(context, torch.int32)
        self.all_indptr = indptr(context + nodes, torch.int32)
        self.mask_indptr = indptr(nodes * (context + nodes), torch.int64)
        visible = torch.zeros(requests, nodes, nodes, dtype=torch.bool)
        for mask in visible:
            for node, parent in enumerate(random_parents(nodes, rng)):
                mask[node] |= mask[parent] if parent >= 0 else mask[node]
                mask[node, node] = True
        self.visible = visible.to(device)
        words = -(-nodes // 64)
        padded = torch.nn.functional.pad(self.visible, (0, 64 * words - nodes)).view(requests, nodes, words, 64)
        self.bits = (padded.long() << torch.arange(64, device=device)).sum(-1)
        self.out = torch.empty_like(self.q)

    @property
    def kv_bytes(self) -> int:
        """Keys and values of one layer, prefix and tree."""
        return (
            2
            * self.requests
            * (self.context + self.nodes)
            * self.shape.kv_heads
            * self.shape.head_dim
            * (self.shape.dtype.itemsize)
        )

    def dense_mask(self) -> torch.Tensor:
        """SGLang's full mask, flattened."""
        prefix = self.visible.new_ones(self.requests, self.nodes, self.context)
        return torch.cat([prefix, self.visible], dim=2).flatten()

    def expected(self, request: int, layer: int) -> torch.Tensor:
        """Float32 [N, heads, head_dim] of one request."""
        size = self.context + self.nodes
        slots = self.all_slots[request * size : (request + 1) * size]
        key, value = (cache[slots].float().movedim(1, 0) for cache in self.caches[layer])
        query = self.q[request * self.nodes : (request + 1) * self.nodes].float().movedim(1, 0)
        prefix = self.visible.new_ones(self.nodes, self.context)
        mask = torch.cat([prefix, self.visible[request]], dim=1)
        logits = query.unflatten(0, (self.shape.kv_heads, -1)) @ key[:, None].transpose(2, 3) * self.shape.scaling
        weights = torch.softmax(logits.masked_fill(~mask, float("-inf")), dim=-1)
        return (weights @ value[:, None]).flatten(0, 1).movedim(0, 1)


class TreeWay:
    """This kernel, planned once."""

    def __init__(self, cell: Cell, args: argparse.Namespace):
        shape, device = cell.shape, cell.q.device
        rows = cell.nodes * shape.heads // shape.kv_heads
        self.cell = cell
        self.tiles = (
            kernel.Tiles(*args.tiles)
            if args.tiles
            else kernel.choose_tiles(rows, shape.head_dim, shape.head_dim, shape.dtype, kernel.shared_memory_of(device))
        )
        processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
        extra = args.extra_splits
        if extra is None:
            extra = kernel.choose_extra_splits(cell.nodes, shape.heads, shape.kv_heads, self.tiles, processors)
        self.plan = kernel.plan_splits(cell.qo_indptr, cell.kv_indptr, extra, min_split=args.min_split)
        self.parts = int(self.plan.requests[:, 1].max())
        self.scratch = kernel.allocate_scratch(cell.requests, extra, cell.nodes, shape.heads, shape.head_dim, device)

    def run(self, layer: int) -> None:
        cell = self.cell
        kernel.tree_attention(
            cell.q,
            *cell.tree_kv[layer],
            *cell.caches[layer],
            cell.qo_indptr,
            cell.kv_indptr,
            cell.kv_indices,
            cell.bits,
            max_nodes=cell.nodes,
            scaling=cell.shape.scaling,
            out=cell.out,
            plan=self.plan,
            scratch=self.scratch,
            tiles=self.tiles,
        )


class SGLangWay:
    """SGLang's Triton extend kernel with the dense mask that its backend hands it."""

    def __init__(self, cell: Cell, args: argparse.Namespace):
        from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

        self.cell, self.forward, self.mask = cell, extend_attention_fwd, cell.dense_mask()

    def run(self, layer: int) -> None:
        cell = self.cell
        self.forward(
            cell.q,
            *cell.tree_kv[layer],
            cell.out,
            *cell.caches[layer],
            cell.qo_indptr,
            cell.kv_indptr,
            cell.kv_indices,
            self.mask,
            True,
            cell.mask_indptr,
            cell.nodes,
            1.0,
            1.0,
            cell.shape.scaling,
        )


class FlashInferWay:
    """FlashInfer's paged prefill, pages of one token as SGLang gives it."""

    workspace: torch.Tensor | None = None

    def __init__(self, cell: Cell, args: argparse.Namespace):
        import flashinfer

        self.cell = cell
        if FlashInferWay.workspace is None:
            FlashInferWay.workspace = torch.empty(512 << 20, dtype=torch.uint8, device=cell.q.device)
        self.wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(FlashInferWay.workspace, "NHD")
        self.wrapper.plan(
            cell.qo_indptr,
            cell.all_indptr,
            cell.all_slots.to(torch.int32),
            torch.ones(cell.requests, dtype=torch.int32, device=cell.q.device),
            cell.shape.heads,
            cell.shape.kv_heads,
            cell.shape.head_dim,
            1,
            custom_mask=cell.dense_mask(),
            sm_scale=cell.shape.scaling,
            q_data_type=cell.shape.dtype,
            kv_data_type=cell.shape.dtype,
        )

    def run(self, layer: int) -> None:
        key, value = self.cell.caches[layer]
        self.wrapper.run(self.cell.q, (key[:, None], value[:, None]), out=self.cell.out)


class TorchWay:
    """The reference in plain PyTorch, a gather and a dense mask per request."""

    def __init__(self, cell: Cell, args: argparse.Namespace):
        self.cell = cell
        module = load("torch_tree_mask", "python/sglang/srt/layers/attention/torch_tree_mask.py")
        self.forward = module.tree_attention
        self.depths = cell.visible.sum(-1) - 1

    def run(self, layer: int) -> None:
        cell = self.cell
        key, value = cell.caches[layer]
        size = cell.context + cell.nodes
        for request in range(cell.requests):
            slots = cell.all_slots[request * size : (request + 1) * size]
            part = slice(request * cell.nodes, (request + 1) * cell.nodes)
            cell.out[part] = self.forward(
                cell.q[part],
                key[slots],
                value[slots],
                cell.visible[request],
                self.depths[request],
                scaling=cell.shape.scaling,
            )


Way = TreeWay | SGLangWay | FlashInferWay | TorchWay
MAKERS: dict[str, Callable[[Cell, argparse.Namespace], Way]] = {
    "tree": TreeWay,
    "sglang": SGLangWay,
    "flashinfer": FlashInferWay,
    "torch": TorchWay,
}


def check_agreement(cell: Cell, name: str, way: Way) -> None:
    """The first and the last request of the last layer against float32.

    Raises:
        SystemExit: they differ; the message names way and cell.
    """
    layer = len(cell.caches) - 1
    cell.out.fill_(float("nan"))
    way.run(layer)
    for request in {0, cell.requests - 1}:
        expected = cell.expected(request, layer)
        part = cell.out[request * cell.nodes : (request + 1) * cell.nodes].float()
        error = float((part - expected).abs().max() / expected.abs().max())
        # Also when it is NaN.
        if not error <= TOLERANCE[cell.shape.dtype]:
            raise SystemExit(
                f"{name} is off by {error:.3g} of the largest value at {cell.requests} requests, context "
                f"{cell.context}, {cell.nodes} nodes; nothing timed."
            )


def measure(run: Callable[[], object], samples: int, flush: torch.Tensor | None) -> list[float]:
    """Microseconds of each sample, ascending."""
    for _ in range(3):
        run()
    return event_times(run, samples, flush)


def copy_bandwidth(gib: float, samples: int) -> float:
    """GB/s of a large copy, bytes read and bytes written."""
    source = torch.empty(int(gib * 2**30), dtype=torch.uint8, device="cuda").fill_(1)
    target = torch.empty_like(source)
    return 2 * source.numel() / statistics.median(measure(lambda: target.copy_(source), samples, None)) / 1000


def bench_cell(cell: Cell, args: argparse.Namespace, copy_gbs: float, flush: torch.Tensor, left_out: dict) -> list[Row]:
    """All ways on one cell; a way that cannot run is named in ``left_out`` and not tried again."""
    layers, rows = len(cell.caches), []
    for name in args.ways:
        if name in left_out:
            continue
        try:
            way = MAKERS[name](cell, args)
            way.run(0)
            torch.cuda.synchronize()
        except Exception as error:
            if name == "tree":
                raise
            left_out[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            continue
        check_agreement(cell, name, way)

        def every_layer(run: Callable[[int], None] = way.run) -> None:
            for layer in range(layers):
                run(layer)

        graph = capture(every_layer, lambda run=way.run: run(0), 2)
        times = [us / layers for us in measure(graph.replay, args.samples, flush)]
        median, low, high = spread(times)
        bandwidth = cell.kv_bytes / median / 1000
        tiles = astuple(way.tiles) if isinstance(way, TreeWay) else (0, 0, 0, 0)
        parts = way.parts if isinstance(way, TreeWay) else 1
        sizes = (cell.requests, cell.context, cell.nodes)
        rows.append(Row(name, *sizes, median, low, high, len(times), bandwidth, bandwidth / copy_gbs, parts, *tiles))
        del graph
    return rows


def layers_that_fit(shape: Shape, requests: int, context: int, nodes: int, wanted: int, room: int) -> int:
    """How many layers' caches fit into ``room`` bytes twice (drawing them takes float32 beside), at most ``wanted``."""
    one = 2 * requests * (context + nodes) * shape.kv_heads * shape.head_dim * shape.dtype.itemsize
    return min(wanted, (room - 2 * one) // (2 * one))


def head(copy_gbs: float, shape: Shape, left_out: dict[str, str]) -> str:
    lines = [
        conditions("bench_tree_attention.py"),
        "",
        f"{shape.heads} query heads, {shape.kv_heads} KV heads, head dimension {shape.head_dim}, {shape.dtype}; "
        f"a large copy reads and writes {copy_gbs:.0f} GB/s.",
    ]
    lines += [f"\n{name} left out: {reason}" for name, reason in left_out.items()]
    return "\n".join(lines)


def cells_of(rows: list[Row]) -> dict[tuple[int, int, int], dict[str, Row]]:
    """(nodes, requests, context) -> way -> row, in the order of the rows."""
    cells: dict[tuple[int, int, int], dict[str, Row]] = {}
    for row in rows:
        cells.setdefault((row.nodes, row.requests, row.context), {})[row.way] = row
    return cells


def markdown(rows: list[Row], head: str) -> str:
    others = [name for name in WAYS[1:] if any(row.way == name for row in rows)]
    lines = [
        head,
        "",
        "Microseconds per layer of the whole batch, median (20th to 80th percentile). Ratios above 1: tree is faster.",
        "",
        "| nodes | requests | context | parts | tree us | GB/s | of copy | "
        + " | ".join(f"{name} us | ratio" for name in others)
        + " |",
        "|---:" * (7 + 2 * len(others)) + "|",
    ]
    for (nodes, requests, context), ways in cells_of(rows).items():
        tree = ways.get("tree")
        cells = [str(nodes), str(requests), str(context)]
        if tree is None:
            cells += ["-"] * 4
        else:
            time = f"{tree.median_us:.1f} ({tree.p20_us:.1f} to {tree.p80_us:.1f})"
            cells += [str(tree.parts_per_request), time, f"{tree.bandwidth_gbs:.0f}", f"{tree.share_of_copy:.0%}"]
        for name in others:
            other = ways.get(name)
            cells.append("-" if other is None else f"{other.median_us:.1f}")
            cells.append("-" if other is None or tree is None else f"{other.median_us / tree.median_us:.2f}")
        lines.append("| " + " | ".join(cells) + " |")
    tiles = sorted({(r.nodes, r.block_m, r.block_n, r.num_warps, r.num_stages) for r in rows if r.way == "tree"})
    lines += [
        "",
        "Tiles (rows x keys, warps, stages): " + "; ".join("N = {}: {} x {}, {}, {}".format(*t) for t in tiles),
    ]
    return "\n".join(lines) + "\n"


def plot(rows: list[Row], path: Path, title: str) -> bool:
    """One panel per number of nodes and requests: microseconds over context. False if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    all_nodes, all_requests = (sorted({getattr(row, name) for row in rows}) for name in ("nodes", "requests"))
    size = (3.6 * len(all_requests), 3.2 * len(all_nodes))
    figure, axes = plt.subplots(len(all_nodes), len(all_requests), figsize=size, sharey=True, squeeze=False)
    for line_axes, nodes in zip(axes, all_nodes, strict=True):
        for axis, requests in zip(line_axes, all_requests, strict=True):
            for way in WAYS:
                line = [row for row in rows if (row.way, row.nodes, row.requests) == (way, nodes, requests)]
                if line:
                    axis.plot([row.context for row in line], [row.median_us for row in line], marker="o", label=way)
            axis.set(xscale="log", yscale="log", title=f"{nodes} nodes, {requests} requests", xlabel="context")
            axis.grid(alpha=0.3)
        line_axes[0].set_ylabel("microseconds per layer")
    axes[0][0].legend()
    figure.suptitle(title, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 4, 8, 32])
    parser.add_argument("--contexts", nargs="+", type=int, default=[128, 1024, 2048, 4096, 32768])
    parser.add_argument("--nodes", nargs="+", type=int, default=[16, 64])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS[:3]))
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--layers", type=int, default=8, help="KV caches that a sample goes through")
    parser.add_argument("--copy-gib", type=float, default=4.0)
    parser.add_argument("--tiles", nargs=4, type=int, metavar=("M", "N", "WARPS", "STAGES"), help="instead of chosen")
    parser.add_argument("--extra-splits", type=int, help="instead of chosen")
    parser.add_argument("--min-split", type=int, default=kernel.MIN_SPLIT, help="keys")
    parser.add_argument("--out", type=Path, required=True, help="results are OUT.csv, OUT.md and OUT.png")
    args = parser.parse_args()
    need_gpu("bench_tree_attention.py")

    shape = Shape(args.heads, args.kv_heads, args.head_dim, getattr(torch, args.dtype))
    copy_gbs = copy_bandwidth(args.copy_gib, args.samples)
    flush = torch.empty(L2_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    rows: list[Row] = []
    left_out: dict[str, str] = {}
    for nodes in args.nodes:
        for requests in args.requests:
            for context in args.contexts:
                torch.cuda.empty_cache()
                room = torch.cuda.mem_get_info()[0]
                layers = layers_that_fit(shape, requests, context, nodes, args.layers, room)
                if layers < 1:
                    print(f"{requests} requests of context {context} do not fit; left out.")
                    continue
                cell = Cell(shape, requests, context, nodes, layers, "cuda")
                rows += bench_cell(cell, args, copy_gbs, flush, left_out)

    write_results(args.out, Row, rows, markdown(rows, head(copy_gbs, shape, left_out)), plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
