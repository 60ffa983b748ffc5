"""The move of accepted keys and values, against an index copy in PyTorch.

In the interpreter or on a GPU, see `_kernels.py`.
"""

from types import SimpleNamespace

import pytest
import torch
from _kernels import DEVICE, INTERPRETED, assert_passes_in_the_interpreter, compile_for

triton = pytest.importorskip("triton")

from sglang.srt.plugins import load_plugins  # noqa: E402

load_plugins()

from sglang_ddtree import overlay  # noqa: E402

overlay.lay()

from sglang.srt.mem_cache import memory_pool  # noqa: E402
from sglang.srt.speculative import ddtree_kv_move as m  # noqa: E402

on_device = [] if INTERPRETED else [pytest.mark.gpu]


def make_pool(layers, slots, k_shape, v_shape, dtype):
    def filled(shape):
        numbers = torch.randint(-100, 100, (slots, *shape), dtype=torch.int32, device=DEVICE)
        return numbers.to(dtype) if dtype.itemsize > 1 else numbers.to(torch.int8).view(dtype)

    pool = SimpleNamespace(
        k_buffer=[filled(k_shape) for _ in range(layers)], v_buffer=[filled(v_shape) for _ in range(layers)]
    )
    buffers = pool.k_buffer + pool.v_buffer
    pool.data_ptrs = torch.tensor([x.data_ptr() for x in buffers], dtype=torch.uint64, device=DEVICE)
    pool.data_strides = torch.tensor([x[0].nbytes for x in buffers], device=DEVICE)
    return pool


def plan(bs, nodes, places, slots, seed):
    """A round's slots, scattered over the pool, and a random path of every length through them."""
    torch.manual_seed(seed)
    slot = (1 + torch.randperm(slots - 1))[: bs * nodes].view(bs, nodes)
    lens = torch.arange(bs) % places + 1
    path = torch.arange(places).repeat(bs, 1)
    for row, n in enumerate(lens.tolist()):
        path[row, 1:n] = (torch.randperm(nodes - 1)[: n - 1] + 1).sort().values
    return slot[:, :places].contiguous(), slot.gather(1, path), lens


@pytest.mark.parametrize(
    ("k_shape", "v_shape", "dtype"),
    [
        ((2, 16), (2, 16), torch.float32),
        ((8, 128), (8, 128), torch.bfloat16),
        ((3, 64), (3, 32), torch.float16),  # keys wider than values
        ((1, 24), (1, 40), torch.float8_e4m3fn),  # neither a power of two
    ],
)
@pytest.mark.parametrize("nodes", [2, 16, 65])
def test_equals_an_index_copy(k_shape, v_shape, dtype, nodes):
    pool = make_pool(3, 700, k_shape, v_shape, dtype)
    places = min(nodes, 16)
    to, source, lens = plan(9, nodes, places, 700, seed=nodes)
    expected = []
    valid = torch.arange(places) < lens[:, None]
    for buffer in pool.k_buffer + pool.v_buffer:
        raw = buffer.clone().view(torch.uint8)
        raw[to[valid]] = raw[source[valid].to(raw.device)]
        expected.append(raw)
    m.move_accepted(pool, to.to(DEVICE), source.to(DEVICE), lens.to(DEVICE).to(torch.int32))
    for buffer, wanted in zip(pool.k_buffer + pool.v_buffer, expected, strict=True):
        assert torch.equal(buffer.view(torch.uint8), wanted)


def test_what_was_not_accepted_stays():
    pool = make_pool(1, 40, (2, 16), (2, 16), torch.float32)
    before = pool.k_buffer[0].clone()
    to, source = torch.tensor([[4, 5, 6]]), torch.tensor([[4, 9, 10]])
    m.move_accepted(pool, to.to(DEVICE), source.to(DEVICE), torch.tensor([2], device=DEVICE))
    after = pool.k_buffer[0]
    assert torch.equal(after[5], before[9]) and not torch.equal(before[5], before[9])
    before[5] = after[5]
    assert torch.equal(after, before)


for test in (test_equals_an_index_copy, test_what_was_not_accepted_stays):
    test.pytestmark = [*getattr(test, "pytestmark", []), *on_device]


def bare(kind, **attributes):
    pool = kind.__new__(kind)
    values = dict(use_hnd=False, layer_num=1, k_buffer=[torch.zeros(2, 1, 8)], v_buffer=[torch.zeros(2, 1, 8)])
    pool.__dict__.update(values | attributes)
    return pool


def test_which_pools_are_copied_here():
    plain = bare(memory_pool.MHATokenToKVPool)
    assert m.movable(plain) is plain
    hybrid = memory_pool.HybridLinearKVPool.__new__(memory_pool.HybridLinearKVPool)
    hybrid.full_kv_pool = plain
    assert m.movable(hybrid) is plain
    assert m.movable(bare(memory_pool.MHATokenToKVPool, use_hnd=True)) is None
    assert m.movable(bare(memory_pool.MHATokenToKVPool, layer_num=0, k_buffer=[], v_buffer=[])) is None
    odd = [torch.zeros(2, 1, 3, dtype=torch.float16)]
    assert m.movable(bare(memory_pool.MHATokenToKVPool, v_buffer=odd)) is None
    for other in (memory_pool.MHATokenToKVPoolFP4, memory_pool.PageMajorMHATokenToKVPool, memory_pool.MLATokenToKVPool):
        assert m.movable(bare(other)) is None


if not INTERPRETED:

    @pytest.mark.parametrize("arch", [80, 90, 100, 120])
    def test_compiles_ahead_of_time(arch, tmp_path, monkeypatch):
        monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
        types = {"data_ptrs": "*u64", "to_stride": "i32", "from_stride": "i32", "accept_lens": "*i32"}
        compiled = compile_for(arch, m._move_kernel, {"BLOCK": 256}, lambda arg: types.get(arg, "*i64"), num_warps=2)
        assert compiled.asm["cubin"]

    def test_in_the_interpreter():
        assert_passes_in_the_interpreter(__file__)
