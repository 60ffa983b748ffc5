"""The device's top-K and log-sum-exp against float64 and plain sorting.

As in `test_ddtree_kernels.py`: with TRITON_INTERPRET=1 the kernels run on the CPU; without, this file starts itself
once with that variable, compiles the kernels ahead of time for several GPUs, and runs on a CUDA device (marker `gpu`).
"""

import math
import sys
from types import SimpleNamespace

import pytest
import torch
from _kernels import DEVICE, INTERPRETED, assert_passes_in_the_interpreter, compile_for
from _load import load

triton = pytest.importorskip("triton")

on_device = [] if INTERPRETED else [pytest.mark.gpu]

FOLDER = "python/sglang/srt/speculative"
k = load("ddtree_topk_kernels", f"{FOLDER}/ddtree_topk_kernels.py")


def load_draft_tail():
    """The draft tail with these modules loaded by path, which stay out of SGLang's own package."""
    reference = load("ddtree_topk", f"{FOLDER}/ddtree_topk.py")
    # Imported when the module runs, and when it is first called.
    sys.modules["sglang.srt.speculative.ddtree_topk"] = reference
    sys.modules["sglang.srt.speculative.ddtree_topk_kernels"] = k
    return load("ddtree_draft_tail", f"{FOLDER}/ddtree_draft_tail.py")


def draw(rows, vocabulary, dtype, seed=0, scale=4.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocabulary, generator=generator) * scale).to(dtype)


def expected(logits, topk):
    """Ids in the total order (larger logit, then lower id), and exact log-probabilities of them."""
    values = logits.double()
    order = [sorted(range(values.shape[1]), key=lambda i, row=row: (-row[i], i))[:topk] for row in values.tolist()]
    ids = torch.tensor(order)
    return ids, values.gather(1, ids) - torch.logsumexp(values, 1, keepdim=True)


def topk_of(logits, topk, start=0):
    chunks = k.chunk_topk(logits.to(DEVICE), topk, start)
    logprobs, ids, lse = k.merge_chunks(*chunks, topk, normalise=True)
    return ids.cpu(), logprobs.cpu(), lse.cpu()


SHAPES = [(1, 5, 1), (3, 5, 5), (2, 300, 8), (4, 4097, 8), (2, 9001, 3), (1, 70, 64)]
FULL_SHAPES = [(15, 151936, 8), (480, 32000, 8), (3, 262144, 64), (1, 128256, 16)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows, vocabulary, topk", [pytest.param(*s, marks=on_device) for s in SHAPES])
def test_equals_sorting_and_float64(rows, vocabulary, topk, dtype):
    # 16-bit logits of a large vocabulary are full of ties.
    logits = draw(rows, vocabulary, dtype)
    ids, logprobs, lse = topk_of(logits, topk)
    exact_ids, exact = expected(logits, topk)
    assert ids.dtype == torch.int64 and logprobs.dtype == lse.dtype == torch.float32
    assert torch.equal(ids, exact_ids)
    torch.testing.assert_close(logprobs.double(), exact, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.double(), torch.logsumexp(logits.double(), 1), rtol=0, atol=1e-5)
    assert bool((logprobs[:, 1:] <= logprobs[:, :-1]).all())


if not INTERPRETED:

    @pytest.mark.gpu
    @pytest.mark.parametrize("rows, vocabulary, topk", FULL_SHAPES)
    def test_equals_torch_at_full_size(rows, vocabulary, topk):
        logits = draw(rows, vocabulary, torch.bfloat16).cuda()
        first, second = topk_of(logits, topk), topk_of(logits, topk)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), "two runs differ"
        ids, logprobs, _ = first
        exact = torch.log_softmax(logits.double(), 1).cpu()
        # Sorting stably by falling value is the same total order.
        order = torch.sort(logits.float(), dim=1, descending=True, stable=True).indices[:, :topk].cpu()
        assert torch.equal(ids, order)
        torch.testing.assert_close(logprobs.double(), exact.gather(1, order), rtol=0, atol=2e-5)


@pytest.mark.parametrize("topk", [pytest.param(7, marks=on_device)])
def test_ties_take_the_lowest_ids(topk):
    logits = torch.full((3, 5000), -1.0)
    logits[1, [4999, 17, 4096, 4095, 300]] = 2.5
    logits[2] = -math.inf
    logits[2, 7] = 0.0
    ids, logprobs, _ = topk_of(logits, topk)
    assert ids[0].tolist() == list(range(topk))
    assert ids[1].tolist() == [17, 300, 4095, 4096, 4999, 0, 1]
    assert ids[2, 0] == 7 and logprobs[2, 0] == 0.0
    assert len(set(ids[2].tolist())) == topk and bool(torch.isneginf(logprobs[2, 1:]).all())


@pytest.mark.parametrize("bad", [pytest.param(x, marks=on_device) for x in (math.nan, math.inf)])
def test_an_undefined_distribution_is_never_accepted(bad):
    logits = draw(3, 4200, torch.float32)
    clean_ids, clean, _ = topk_of(logits, 6)
    logits[1, 4150] = bad
    ids, logprobs, _ = topk_of(logits, 6)
    assert bool(torch.isneginf(logprobs[1]).all())
    assert bool(((ids >= 0) & (ids < 4200)).all()) and len(set(ids[1].tolist())) == 6
    for row in (0, 2):
        assert torch.equal(ids[row], clean_ids[row]) and torch.equal(logprobs[row], clean[row])


@pytest.mark.parametrize(
    "sizes", [pytest.param(x, marks=on_device) for x in ((200, 101), (3, 298), (100, 1, 100, 100))]
)
def test_ranks_merge_to_the_whole(sizes):
    """Every rank's own K and log-sum-exp, merged as if the ranks were chunks."""
    logits = draw(5, 301, torch.bfloat16)
    topk, start, parts = 8, 0, []
    for size in sizes:
        shard = logits[:, start : start + size].contiguous().to(DEVICE)
        parts.append(k.merge_chunks(*k.chunk_topk(shard, topk, start), topk, normalise=False))
        start += size
    values, ids, lse = (torch.stack(part) for part in zip(*parts, strict=True))
    assert bool((ids[torch.tensor(sizes) < topk][..., 3:] == -1).all())
    logprobs, merged, _ = k.merge_chunks(values, ids, lse, topk, normalise=True)
    whole_ids, whole, _ = topk_of(logits, topk)
    assert torch.equal(merged.cpu(), whole_ids)
    torch.testing.assert_close(logprobs.cpu(), whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rows", [pytest.param(2, marks=on_device)])
def test_rows_of_a_wider_matrix(rows):
    wide = draw(rows, 640, torch.float32)
    ids, logprobs, _ = topk_of(wide.to(DEVICE)[:, :600], 4)
    assert torch.equal(ids, expected(wide[:, :600], 4)[0])
    assert topk_of(wide[:0], 4)[0].shape == (0, 4)


def make_head(weight, start=0):
    shard = SimpleNamespace(num_org_elements=weight.shape[0] - 2, org_vocab_start_index=start, num_added_elements=0)
    return SimpleNamespace(weight=weight.to(DEVICE), shard_indices=shard)


class Group:
    """A tensor-parallel group of which every rank is asked in turn: first what it gives, then what it makes of all."""

    def __init__(self, world_size):
        self.world_size, self.parts = world_size, []

    def all_gather(self, part, dim):
        assert dim == 0 and part.is_contiguous()
        if len(self.parts) < self.world_size:
            self.parts.append(part.clone())
        return torch.cat((self.parts + [part] * self.world_size)[: self.world_size])


if INTERPRETED or torch.cuda.is_available():
    tail = load_draft_tail()

    @pytest.mark.parametrize("sizes", [pytest.param(x, marks=on_device) for x in ((301,), (200, 101), (3, 150, 148))])
    def test_the_draft_tail_of_every_rank(sizes):
        """Head, candidates and buffers; two rows of padding at the end of each shard would win if they counted."""
        block_size, topk, bs, hidden = 5, 8, 3, 16
        generator = torch.Generator().manual_seed(len(sizes))
        states = torch.randn(bs * block_size, hidden, generator=generator).to(DEVICE)
        weight = torch.randn(sum(sizes), hidden, generator=generator)
        bounds = [sum(sizes[:i]) for i in range(len(sizes))]
        heads = [
            make_head(torch.cat([weight[a : a + size], 100 * weight[:2]]), a)
            for a, size in zip(bounds, sizes, strict=True)
        ]
        group = Group(len(sizes))
        for _ in range(2):  # what all ranks give is known the second time
            tails = [
                tail.DraftTail(
                    lm_head=head, block_size=block_size, topk=topk, max_bs=bs + 1, tp_group=group, device=DEVICE
                )
                for head in heads
            ]
            for one in tails:
                one(states)
        drafted = states.view(bs, block_size, hidden)[:, 1:].cpu()
        exact_ids, exact = expected((drafted.reshape(-1, hidden) @ weight.T), topk)
        for one in tails:
            assert torch.equal(one.ids[:bs].cpu().view(-1, topk), exact_ids)
            torch.testing.assert_close(one.logprobs[:bs].cpu().view(-1, topk).double(), exact, rtol=0, atol=2e-5)
            assert torch.equal(one.logprobs, tails[0].logprobs)
            assert bool(torch.isneginf(one.logprobs[bs:]).all()) and not bool(one.ids[bs:].any())

    @pytest.mark.parametrize("ranks", [pytest.param(2, marks=on_device)])
    def test_packed_ranks_are_unpacked_bit_for_bit(ranks):
        values = draw(ranks * 3, 4, torch.float32).view(ranks, 3, 4)
        values[0, 0, 0] = -math.inf
        ids = torch.tensor([-1, 0, 5, 2**31 - 1]).repeat(ranks, 3, 1)
        lse = draw(ranks, 3, torch.float32)
        lse[0, 0] = math.nan
        packed = torch.stack([tail.pack(*part) for part in zip(values, ids, lse, strict=True)])
        for got, sent in zip(tail.unpack(packed), (values, ids, lse), strict=True):
            assert got.dtype == sent.dtype and got.is_contiguous()
            raw = torch.int32 if sent.dtype == torch.float32 else torch.int64
            assert torch.equal(got.view(raw), sent.view(raw))


def test_refuses():
    logits = torch.zeros(2, 9)
    for args, message in (
        ((logits, 0), "k must be from 1 to 64, got 0"),
        ((logits, 65), "k must be from 1 to 64, got 65"),
        ((logits[0], 2), r"logits must be \[rows, vocabulary\]"),
        ((logits.T.contiguous().T, 2), "contiguous rows"),
    ):
        with pytest.raises(ValueError, match=message):
            k.chunk_topk(*args)
    part = torch.zeros(2048, 1, 64)
    with pytest.raises(ValueError, match="too many"):
        k.merge_chunks(part, part.long(), part[..., 0], 8, normalise=True)


if not INTERPRETED:

    def kernel_cases():
        for dtype in ("*bf16", "*fp32"):
            yield f"chunk-{dtype}", k._chunk_kernel, {"GROUPS": 64, "WIDTH": 64}, {"logits": dtype}, 4
        for normalise in (True, False):
            sizes = {"CHUNKS": 64, "WIDTH": 8, "NORMALISE": normalise}
            yield f"merge-{normalise}", k._merge_kernel, sizes, {}, 4
        yield "merge-large", k._merge_kernel, {"CHUNKS": 128, "WIDTH": 64, "NORMALISE": True}, {}, 8

    @pytest.mark.parametrize("arch", [80, 90, 100, 120])
    def test_kernels_compile_ahead_of_time(arch, tmp_path, monkeypatch):
        monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
        types = {"values": "*fp32", "ids": "*i64", "lse": "*fp32"}
        types |= {"values_out": "*fp32", "ids_out": "*i64", "lse_out": "*fp32"}
        for name, kernel, constants, own, warps in kernel_cases():
            kinds = types | own
            compiled = compile_for(
                arch, kernel, constants, lambda arg, kinds=kinds: kinds.get(arg, "i32"), num_warps=warps
            )
            assert compiled.asm["cubin"], name

    def test_the_kernels_in_the_interpreter():
        assert_passes_in_the_interpreter(__file__)
