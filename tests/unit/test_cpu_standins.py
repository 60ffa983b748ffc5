"""The torch stand-ins for sgl_kernel, against plain Python loops."""

import importlib.util
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "python" / "sglang_ddtree" / "cpu" / "site"
UNTOUCHED = -77


def load_package(name: str, folder: Path):
    """Import a package by path under a private name, so that no installed package of that name matters."""
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


kernels = load_package("_sgl_kernel_stand_in", SITE / "sgl_kernel")


def random_rows(rng, num_rows, pool_len):
    """req_to_token with a different slot in every place, and rows in random order."""
    slots = list(range(1, num_rows * pool_len + 1))
    rng.shuffle(slots)
    req_to_token = torch.tensor(slots, dtype=torch.int32).view(num_rows, pool_len)
    return req_to_token, rng.sample(range(num_rows), num_rows)


def random_ranges(rng, bs, pool_len):
    """Ranges of a row's positions; some are empty and one, if there is room, reaches the row's end."""
    starts = [rng.randrange(pool_len + 1) for _ in range(bs)]
    ends = [rng.choice([start, rng.randint(start, pool_len)]) for start in starts]
    ends[-1] = pool_len
    return starts, ends


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("bs", [1, 2, 5])
def test_assign_req_to_token_pool(seed, bs):
    rng = random.Random(seed)
    req_to_token, rows = random_rows(rng, 7, 23)
    starts, ends = random_ranges(rng, bs, 23)
    total = sum(end - start for start, end in zip(starts, ends, strict=True))
    new_slots = torch.tensor([rng.randrange(10**6) for _ in range(total + 3)], dtype=torch.int64)

    expected = req_to_token.tolist()
    taken = iter(new_slots.tolist())
    for row, start, end in zip(rows, starts, ends, strict=False):
        for position in range(start, end):
            expected[row][position] = next(taken)

    kernels.assign_req_to_token_pool_cpu(
        torch.tensor(rows[:bs]), req_to_token, torch.tensor(starts), torch.tensor(ends), new_slots, 23
    )
    assert req_to_token.tolist() == expected


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("bs", [1, 2, 5])
def test_assign_extend_cache_locs(seed, bs, index_dtype):
    rng = random.Random(seed)
    req_to_token, rows = random_rows(rng, 7, 23)
    starts, ends = random_ranges(rng, bs, 23)
    expected = []
    for row, start, end in zip(rows, starts, ends, strict=False):
        expected += [int(req_to_token[row, position]) for position in range(start, end)]
    out = torch.full((len(expected) + 3,), UNTOUCHED, dtype=torch.int64)

    kernels.assign_extend_cache_locs_cpu(
        torch.tensor(rows[:bs], dtype=index_dtype),
        req_to_token,
        torch.tensor(starts, dtype=index_dtype),
        torch.tensor(ends, dtype=index_dtype),
        out,
        23,
    )
    assert out.tolist() == expected + [UNTOUCHED] * 3


@pytest.mark.parametrize("topk, num_steps", [(1, 1), (1, 4), (3, 2)])
@pytest.mark.parametrize("bs", [1, 4])
def test_assign_draft_cache_locs_contiguous(bs, topk, num_steps):
    rng = random.Random(bs)
    req_to_token, rows = random_rows(rng, 5, 19)
    count = topk * num_steps
    lengths = [0, 19 - count, 5, 1][:bs]
    expected = []
    for row, length in zip(rows, lengths, strict=False):
        expected += [int(req_to_token[row, length + i]) for i in range(count)]
    out = torch.full((bs * count,), UNTOUCHED, dtype=torch.int64)

    kernels.assign_draft_cache_locs_contiguous_cpu(
        torch.tensor(rows[:bs]), req_to_token, torch.tensor(lengths), out, 19, topk, num_steps
    )
    assert out.tolist() == expected


def test_a_range_past_the_end_of_a_row_is_an_error():
    req_to_token = torch.zeros(3, 8, dtype=torch.int32)
    row, start, end = torch.tensor([1]), torch.tensor([6]), torch.tensor([9])
    slots = torch.arange(1, 4)
    with pytest.raises(AssertionError, match=r"row 1 of req_to_token has 8 positions.*\[6, 9\)"):
        kernels.assign_req_to_token_pool_cpu(row, req_to_token, start, end, slots, 8)
    with pytest.raises(AssertionError, match="row 1 of req_to_token"):
        kernels.assign_extend_cache_locs_cpu(row, req_to_token, start, end, slots, 8)
    assert not req_to_token.any()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("bs", [1, 3])
def test_fill_bonus_tokens(seed, bs):
    rng = random.Random(seed)
    width = 4
    tokens = [[rng.randrange(500) for _ in range(width)] for _ in range(bs)]
    lengths = [rng.choice([1, width, rng.randint(1, width)]) for _ in range(bs)]
    bonus = torch.full((bs,), UNTOUCHED, dtype=torch.int64)
    kernels.fill_bonus_tokens_cpu(
        torch.tensor(tokens, dtype=torch.int32).flatten(),
        torch.tensor(lengths, dtype=torch.int32),
        bonus,
        width,
    )
    assert bonus.tolist() == [row[length - 1] for row, length in zip(tokens, lengths, strict=True)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("bs", [1, 3])
def test_fill_accept_out_cache_loc(seed, bs):
    rng = random.Random(seed)
    nodes, width = 6, 4
    accept_index = []
    for b in range(bs):
        kept = sorted(rng.sample(range(b * nodes, (b + 1) * nodes), rng.randint(0, width)))
        accept_index.append(kept + [-1] * (width - len(kept)))
    slots = [rng.randrange(10**6) for _ in range(bs * nodes)]
    expected = [slots[node] for row in accept_index for node in row if node != -1]
    out = torch.full((bs * width,), UNTOUCHED, dtype=torch.int64)
    kernels.fill_accept_out_cache_loc_cpu(torch.tensor(accept_index, dtype=torch.int32), torch.tensor(slots), out)
    assert out.tolist() == expected + [UNTOUCHED] * (bs * width - len(expected))


@pytest.mark.parametrize("with_select_index", [False, True])
@pytest.mark.parametrize("lengths", [[1], [4], [3, 0, 1, 5]])
def test_rotate_input_ids(lengths, with_select_index):
    rng = random.Random(len(lengths))
    tokens = [rng.randrange(500) for _ in range(sum(lengths))]
    starts = [sum(lengths[:b]) for b in range(len(lengths))]
    new_tokens = [1000 + b for b in range(len(lengths))]
    last = [start + max(length - 1, 0) for start, length in zip(starts, lengths, strict=True)]
    places = [rng.randint(start, end) for start, end in zip(starts, last, strict=True)] if with_select_index else last

    expected = list(tokens)
    for b, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        for i in range(start, start + length - 1):
            expected[i] = tokens[i + 1]
        if length:
            expected[places[b]] = new_tokens[b]

    input_ids = torch.tensor(tokens)
    kernels.rotate_input_ids_cpu(
        input_ids,
        torch.tensor(starts),
        torch.tensor(lengths),
        torch.tensor(new_tokens)[:, None],
        torch.tensor(places) if with_select_index else None,
    )
    assert input_ids.tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("heads_dim", [(2, 3), (1, 8)])
@pytest.mark.parametrize("seed", range(4))
def test_copy_all_layer_kv_cache(seed, heads_dim, dtype):
    generator = torch.Generator().manual_seed(seed)
    num_slots = 12
    buffers = [torch.randint(0, 200, (num_slots, *heads_dim), generator=generator).to(dtype) for _ in range(3)]
    # A buffer whose rows have another width, as V may have.
    buffers.append(torch.randint(0, 200, (num_slots, 5), generator=generator).to(dtype))
    # Targets overlap the sources: a cycle, a shift, a slot onto itself.
    sources = torch.randperm(num_slots, generator=generator)[:7]
    targets = torch.cat([sources[1:], sources[:1]]) if seed % 2 else torch.arange(7)

    expected = []
    for buffer in buffers:
        rows = buffer.tolist()
        copy = list(rows)
        for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
            copy[target] = rows[source]
        expected.append(copy)

    copy_slots(buffers, targets, sources)
    assert [buffer.tolist() for buffer in buffers] == expected


def copy_slots(buffers, targets, sources):
    kernels.copy_all_layer_kv_cache_cpu(
        torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.uint64),
        torch.tensor([buffer[0].nbytes for buffer in buffers]),
        targets,
        sources,
    )


def test_copy_all_layer_kv_cache_edges():
    buffer = torch.arange(12.0).view(4, 3)
    before = buffer.clone()
    none = torch.empty(0, dtype=torch.int64)
    copy_slots([buffer], none, none)
    copy_slots([buffer], torch.zeros(5, dtype=torch.int64), torch.zeros(5, dtype=torch.int64))
    assert torch.equal(buffer, before)
    # int32 slots, and slots taken from a view with a stride.
    copy_slots([buffer], torch.tensor([3, 0], dtype=torch.int32)[:1], torch.arange(8)[1::4][:1])
    assert torch.equal(buffer[3], before[1])
    with pytest.raises(AssertionError, match="must not be negative, got -1"):
        copy_slots([buffer], torch.tensor([0]), torch.tensor([-1]))
    assert torch.equal(buffer[:3], before[:3])


def random_eagle_tree(rng, topk, depth, num_nodes):
    """Select a tree as EAGLE does: candidates of each step in beams, a parent before its child.

    Returns beam_candidates (entry i: the candidate that beam i extends), selected candidate numbers, and each
    node's parent.
    """
    beam_candidates = [-1]
    chosen: dict[int, int | None] = {}
    frontier = list(range(topk))
    available: list[tuple[int, int | None]] = [(candidate, None) for candidate in frontier]
    next_candidate = topk
    parent_candidate = {candidate: None for candidate in frontier}
    for _ in range(depth - 1):
        # The beams of the next step extend topk of this step's candidates.
        extended = rng.sample(frontier, topk)
        frontier = []
        for candidate in extended:
            beam_candidates.append(candidate)
            for _ in range(topk):
                parent_candidate[next_candidate] = candidate
                available.append((next_candidate, candidate))
                frontier.append(next_candidate)
                next_candidate += 1
    while len(chosen) < num_nodes - 1:
        candidate, parent = rng.choice(available)
        if candidate not in chosen and (parent is None or parent in chosen):
            chosen[candidate] = parent
    selected = sorted(chosen)
    node_of = {candidate: node for node, candidate in enumerate(selected, start=1)}
    parents = [-1] + [0 if chosen[c] is None else node_of[chosen[c]] for c in selected]
    return beam_candidates, selected, parents


def expected_tree(parents):
    """Ancestor-or-self sets, depths, first children and next siblings by plain loops."""
    ancestors = []
    for node in range(len(parents)):
        path = {node}
        while parents[node] != -1:
            node = parents[node]
            path.add(node)
        ancestors.append(path)
    depths = [len(path) - 1 for path in ancestors]
    children = [[c for c in range(len(parents)) if parents[c] == p] for p in range(len(parents))]
    first_child = [group[0] if group else -1 for group in children]
    next_sibling = [-1] * len(parents)
    for group in children:
        for left, right in zip(group, group[1:], strict=False):
            next_sibling[left] = right
    return ancestors, depths, first_child, next_sibling


@pytest.mark.parametrize("mode", [0, 1], ids=["FULL_MASK", "QLEN_ONLY"])
@pytest.mark.parametrize(
    "bs, topk, depth, num_nodes", [(1, 1, 1, 2), (1, 1, 5, 6), (3, 4, 1, 5), (3, 3, 4, 12), (2, 2, 3, 9)]
)
def test_build_tree(bs, topk, depth, num_nodes, mode):
    rng = random.Random(bs * 100 + topk * 10 + depth)
    trees = [random_eagle_tree(rng, topk, depth, num_nodes) for _ in range(bs)]
    lengths = [rng.choice([0, 3, 11]) for _ in range(bs)]
    prefix = lengths if mode == 0 else [0] * bs
    # The prefix columns belong to the caller: a random pattern there must survive.
    tree_mask = torch.rand(sum(num_nodes * (length + num_nodes) for length in prefix)) < 0.5
    before = tree_mask.tolist()
    positions = torch.full((bs * num_nodes,), UNTOUCHED)
    index, first_child, next_sibling = torch.full((3, bs, num_nodes), -1)

    kernels.build_tree_kernel_efficient_cpu(
        torch.tensor([tree[0] for tree in trees]),
        torch.tensor([tree[1] for tree in trees]),
        torch.tensor(lengths),
        tree_mask,
        positions,
        index,
        first_child,
        next_sibling,
        topk,
        depth,
        num_nodes,
        mode,
    )

    assert index.flatten().tolist() == list(range(bs * num_nodes))
    cell = 0
    for b, (_, _, parents) in enumerate(trees):
        ancestors, depths, children, siblings = expected_tree(parents)
        assert positions[b * num_nodes : (b + 1) * num_nodes].tolist() == [lengths[b] + d for d in depths]
        assert first_child[b].tolist() == children
        assert next_sibling[b].tolist() == siblings
        for row in range(num_nodes):
            for column in range(-prefix[b], num_nodes):
                expected = before[cell] if column < 0 else column in ancestors[row]
                assert bool(tree_mask[cell]) == expected, (b, row, column)
                cell += 1


def test_build_tree_leaves_out_a_node_whose_parent_was_not_selected():
    # topk 2, depth 2: candidates 0 and 1 hang from the root, 2 and 3 from candidate 1, which is not selected.
    tree_mask = torch.ones(9, dtype=torch.bool)
    positions = torch.empty(3, dtype=torch.int64)
    index, first_child, next_sibling = torch.full((3, 1, 3), -1)
    kernels.build_tree_kernel_efficient_cpu(
        torch.tensor([[-1, 1, 0]]),
        torch.tensor([[0, 2]]),
        torch.tensor([4]),
        tree_mask,
        positions,
        index,
        first_child,
        next_sibling,
        2,
        2,
        3,
        1,
    )
    assert first_child.tolist() == [[1, -1, -1]]
    assert next_sibling.tolist() == [[-1, -1, -1]]
    assert tree_mask.view(3, 3).tolist() == [[True, False, False], [True, True, False], [True, False, True]]


def random_parents(rng, num_nodes):
    return [-1] + [rng.randrange(node) for node in range(1, num_nodes)]


SHAPES = {
    "root only": [-1],
    "chain": [-1, 0, 1, 2, 3],
    "star": [-1, 0, 0, 0, 0],
    "random": None,
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bs", [1, 3])
def test_reconstruct_indices_from_tree_mask(shape, bs):
    rng = random.Random(bs)
    trees = [SHAPES[shape] or random_parents(rng, 9) for _ in range(bs)]
    num_nodes = len(trees[0])
    lengths = [rng.randrange(20) for _ in range(bs)]
    expected = [expected_tree(parents) for parents in trees]
    mask = torch.zeros(bs, num_nodes, num_nodes, dtype=torch.bool)
    for b in range(bs):
        for row in range(num_nodes):
            for column in expected[b][0][row]:
                mask[b, row, column] = True
    positions = torch.full((bs * num_nodes,), UNTOUCHED)
    index, first_child, next_sibling = torch.full((3, bs, num_nodes), UNTOUCHED)

    kernels.reconstruct_indices_from_tree_mask(
        mask.flatten(), torch.tensor(lengths), positions, index, first_child, next_sibling, bs, num_nodes
    )
    assert index.flatten().tolist() == list(range(bs * num_nodes))
    for b, (_, depths, children, siblings) in enumerate(expected):
        assert positions.view(bs, -1)[b].tolist() == [lengths[b] + d for d in depths]
        assert first_child[b].tolist() == children
        assert next_sibling[b].tolist() == siblings


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("bs", [1, 3])
@pytest.mark.parametrize("max_visited", [1, 3, 9])
def test_verify_tree_greedy(seed, bs, max_visited):
    rng = random.Random(seed)
    num_nodes = 9
    trees = [random_parents(rng, num_nodes) for _ in range(bs)]
    # Few tokens, so that walks go deep and siblings share tokens; token 0 is a token like any other.
    candidates = [[rng.randrange(3) for _ in range(num_nodes)] for _ in range(bs)]
    choices = [[rng.randrange(3) for _ in range(num_nodes)] for _ in range(bs)]

    predicts = [UNTOUCHED] * (bs * num_nodes)
    visited_nodes = []
    for b, parents in enumerate(trees):
        node, path = 0, [0]
        while len(path) < max_visited:
            matches = [
                child
                for child in range(num_nodes)
                if parents[child] == node and candidates[b][child] == choices[b][node]
            ]
            if not matches:
                break
            node = matches[0]
            path.append(node)
        for node in path:
            predicts[b * num_nodes + node] = choices[b][node]
        visited_nodes.append([b * num_nodes + node for node in path])

    links = [expected_tree(parents) for parents in trees]
    out_predicts = torch.full((bs * num_nodes,), UNTOUCHED, dtype=torch.int32)
    accept_index = torch.full((bs, max_visited), -1, dtype=torch.int32)
    accepted = torch.full((bs,), UNTOUCHED, dtype=torch.int32)
    kernels.verify_tree_greedy_cpu(
        predicts=out_predicts,
        accept_index=accept_index,
        accept_token_num=accepted,
        candidates=torch.tensor(candidates),
        retrive_index=torch.arange(bs * num_nodes).view(bs, num_nodes),
        retrive_next_token=torch.tensor([tree[2] for tree in links]),
        retrive_next_sibling=torch.tensor([tree[3] for tree in links]),
        target_predict=torch.tensor(choices),
    )
    assert out_predicts.tolist() == predicts
    assert accepted.tolist() == [len(path) - 1 for path in visited_nodes]
    assert accept_index.tolist() == [path + [-1] * (max_visited - len(path)) for path in visited_nodes]


def test_missing_kernels_say_so_and_probes_fail():
    with pytest.raises(NotImplementedError, match="this machine has no GPU: merge_state_v2 has no CPU stand-in"):
        kernels.merge_state_v2(1, scale=2)
    with pytest.raises(NotImplementedError, match="bit-packed mask"):
        kernels.build_tree_kernel_efficient_cpu(*[None] * 8, 1, 1, 2, 2)
    with pytest.raises(NotImplementedError, match="fused_sigmoid_mul_cpu has no CPU stand-in"):
        torch.ops.sgl_kernel.fused_sigmoid_mul_cpu(1)
    # SGLang takes the presence of these for a feature.
    for name in ("causal_conv1d_fwd", "causal_conv1d_update", "rmsnorm", "silu_and_mul", "fused_experts"):
        assert not hasattr(kernels, name)
    for submodule in ("allreduce", "scalar_type", "flash_attn"):
        assert importlib.util.find_spec(f"{kernels.__name__}.{submodule}") is None


@pytest.mark.parametrize(
    "files, expected",
    [
        ({}, True),
        ({"__init__.py": "from . import helper\nraise ImportError('libcuda.so.1')", "helper.py": ""}, True),
        ({"__init__.py": "from . import helper\nraise OSError('no driver')", "helper.py": ""}, True),
        ({"__init__.py": "from . import helper", "helper.py": ""}, False),
    ],
    ids=["absent", "ImportError", "OSError", "works"],
)
def test_needs_stand_ins(files, expected, tmp_path, monkeypatch):
    cpu = load_package("_cpu_under_test", SITE.parent)
    for name in [name for name in sys.modules if name.split(".")[0] == "sgl_kernel"]:
        monkeypatch.delitem(sys.modules, name)
    # Of an installed sgl_kernel nothing may be found, so the search path is only the test's own folder.
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(cpu, "has_accelerator", lambda: False)
    attempts = tmp_path / "attempts"
    for name, text in files.items():
        (tmp_path / "sgl_kernel").mkdir(exist_ok=True)
        (tmp_path / "sgl_kernel" / name).write_text(text)
    if files:
        source = tmp_path / "sgl_kernel" / "__init__.py"
        source.write_text(f"open({str(attempts)!r}, 'a').write('x')\n" + source.read_text())

    assert cpu.needs_stand_ins() is expected
    assert cpu.needs_stand_ins() is expected
    left = {name for name in sys.modules if name.split(".")[0] == "sgl_kernel"}
    assert left == (set() if expected else {"sgl_kernel", "sgl_kernel.helper"})
    assert (len(attempts.read_text()) if files else 0) == bool(files)
    for name in left:
        del sys.modules[name]


def test_an_accelerator_needs_no_stand_ins(monkeypatch):
    cpu = load_package("_cpu_under_test", SITE.parent)
    monkeypatch.setattr(cpu, "has_accelerator", lambda: True)
    assert cpu.needs_stand_ins() is False


CHILD = """
import os, sys
import sgl_kernel, sgl_kernel.mamba, sgl_kernel.speculative

def report(queue):
    import torch
    import sgl_kernel
    announces_amx = hasattr(torch.ops.sgl_kernel, "convert_weight_packed")
    settings = [os.environ[name] for name in ("SGLANG_USE_CPU_ENGINE", "SGLANG_NCCL_SO_PATH")]
    queue.put((sgl_kernel.__file__, *settings, sys.path[0], announces_amx))
"""

PARENT = """
import importlib.util, multiprocessing, os, sys, types

if __name__ == "__main__":
    os.environ.pop("SGLANG_USE_CPU_ENGINE", None)
    os.environ["SGLANG_NCCL_SO_PATH"] = "the user's own"
    spec = importlib.util.spec_from_file_location("cpu", sys.argv[1])
    cpu = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cpu)
    half_imported = types.ModuleType("sgl_kernel.speculative")
    half_imported.__file__ = "/elsewhere/sgl_kernel/speculative.py"
    sys.modules["sgl_kernel.speculative"] = half_imported
    cpu.install()
    cpu.install()
    assert "sgl_kernel.speculative" not in sys.modules
    assert sys.path.count(str(cpu.SITE)) == 1
    import sgl_kernel.speculative
    assert cpu.needs_stand_ins() is not cpu.has_accelerator()
    from child import report
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=report, args=(queue,))
    process.start()
    print("REPORT", *queue.get(timeout=60), sep="|")
    process.join()
"""


def test_install_reaches_spawned_processes(tmp_path):
    (tmp_path / "child.py").write_text(CHILD)
    (tmp_path / "parent.py").write_text(PARENT)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, tmp_path / "parent.py", SITE.parent / "__init__.py"],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert result.returncode == 0, result.stderr
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("REPORT"))
    stand_in = str(SITE / "sgl_kernel" / "__init__.py")
    assert line.split("|")[1:] == [stand_in, "1", "the user's own", str(SITE), "False"]
