"""What only a GPU shows: Triton and FlashInfer tree masks, pages, and no host synchronisation in the tree code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_models
import torch
from _load import load_ddtree_utils
from serving import GPU_ENVIRONMENT, HERE, Server, output_ids

pytestmark = pytest.mark.gpu
PROMPTS = [list(b"hello tree"), list(b"a second, longer prompt"), list(b"0123456789 " * 6)]
DEPTH = 7
SIDE = [[0, 1, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0], [-1] * DEPTH]
PARAMS = dict(max_new_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu")
    tiny_models.make_target(folder / "target")
    tiny_models.make_drafter(folder / "drafter", block_size=DEPTH + 1)
    (folder / "script.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def serve(folder: Path) -> Iterator:
    started: dict[tuple[str, ...], Server] = {}

    def get(*flags: str, tree: bool) -> Server:
        key = (*flags, str(tree))
        if key not in started:
            command = [
                "--model-path",
                str(folder / "target"),
                "--dtype",
                "float32",
                "--mem-fraction-static",
                "0.2",
            ]
            command += ["--max-total-tokens", "16384", "--max-running-requests", "8", *flags]
            command += ["--cuda-graph-backend-prefill", "disabled"]
            env = {"PYTHONPATH": str(HERE / "plugins"), **GPU_ENVIRONMENT}
            if tree:
                command += ["--speculative-algorithm", "DDTREE"]
                command += ["--speculative-draft-model-path", str(folder / "drafter")]
                env["DDTREE_TEST_SCRIPT"] = str(folder / "script.json")
                env["DDTREE_TEST_TARGET"] = str(folder / "target")
            started[key] = Server(command, folder / f"{len(started)}.log", env=env)
            started[key].wait_ready()
        return started[key]

    yield get
    for server in started.values():
        server.stop()


@pytest.mark.parametrize("page_size", ["1", "16"])
def test_triton_float32(serve, folder: Path, page_size: str) -> None:
    expected = output_ids(serve("--attention-backend", "triton", tree=False).generate(PROMPTS, **PARAMS))
    server = serve("--attention-backend", "triton", "--page-size", page_size, tree=True)
    for script in ("{}", f'{{"ranks": {SIDE}}}'):
        (folder / "script.json").write_text(script)
        answers = server.generate(PROMPTS, **PARAMS)
        assert output_ids(answers) == expected
    assert answers[0]["meta_info"]["spec_num_correct_drafts"] > 30
    server.assert_pool_empty()


def random_candidates(bs: int, positions: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(bs * 1000 + width)
    logits = torch.randn(bs, positions, 50, generator=generator) * 3
    values, ids = torch.log_softmax(logits, -1).topk(width, -1)
    # Coarse values make ties.
    return ids, (values * 4).round() / 4


@pytest.mark.parametrize("budget", [1, 7, 15, 63, 255])
@pytest.mark.parametrize("width", [1, 8, 16])
def test_builder_on_the_device_equals_the_heap(budget: int, width: int) -> None:
    utils = load_ddtree_utils()
    ids, logprobs = random_candidates(5, 15, width)
    roots = torch.arange(5)
    tree = utils.build_trees(roots.cuda(), ids.cuda(), logprobs.cuda(), budget)
    for b in range(5):
        heap = utils.build_tree_heap(b, ids[b], logprobs[b], budget)
        nodes = len(heap.tokens)
        assert tree.num_nodes[b].item() == nodes
        assert tree.tokens[b, :nodes].tolist() == heap.tokens
        assert tree.parents[b, :nodes].tolist() == heap.parents
        assert tree.scores[b, :nodes].tolist() == heap.scores


def test_tree_code_never_synchronises() -> None:
    utils = load_ddtree_utils()
    ids, logprobs = (t.cuda() for t in random_candidates(4, 15, 8))
    roots, seq_lens = torch.zeros(4, dtype=torch.int64).cuda(), torch.tensor([5, 9, 1, 70]).cuda()
    choices = torch.randint(0, 50, (4, 16), device="cuda")
    buffer = torch.zeros(16 * (85 + 4 * 16), dtype=torch.bool, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        tree = utils.build_trees(roots, ids, logprobs, 15, validate=False)
        utils.full_mask(tree.visible, seq_lens, out=buffer)
        utils.walk_trees(tree.tokens, tree.parents, choices, 15)
    finally:
        torch.cuda.set_sync_debug_mode("default")
