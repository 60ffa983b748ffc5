"""What the device round does on a GPU alone: CUDA graphs, streams, and no wait for the device within a round."""

from __future__ import annotations

import itertools

import pytest
from launcher import ServerDied
from pairs import BLOCK_SIZE, Pair
from serving import output_ids

pytestmark = pytest.mark.gpu

DEPTH = BLOCK_SIZE - 1
# Three requests are padded to a captured batch of four.
PROMPTS = [list(b"hello tree"), list(b"a second, longer prompt"), list(b"0123456789 " * 12)]
LENGTH = dict(max_new_tokens=41, ignore_eos=True)
# Trees of two shapes in turn: a graph that kept its capture's mask, or the last round's, would accept less or wrongly.
SCRIPTS = {
    "the drafter's own": None,
    "two side branches in turn": [[1, 0, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0, 0]],
    "a side branch, then nothing": [[0, 1, 0, -1, -1, -1, -1], [-1] * DEPTH],
}
MODES = list(itertools.product((True, False), (True, False), ("1", "16")))


def flags(graphs: bool, overlap: bool, page_size: str, backend: str) -> list[str]:
    chosen = ["--speculative-ddtree-budget", "15", "--attention-backend", backend, "--page-size", page_size]
    chosen += [] if graphs else ["--disable-cuda-graph"]
    return chosen + ([] if overlap else ["--disable-overlap-schedule"])


@pytest.mark.feature("attention backend `triton` (a GPU's default)", on="gpu")
@pytest.mark.feature("decode CUDA graphs")
@pytest.mark.feature("overlap scheduling")
@pytest.mark.feature("`--page-size` above 1 (16 and 64)")
@pytest.mark.parametrize("graphs, overlap, page_size", MODES)
def test_graphs_overlap_and_pages(qwen3: Pair, graphs: bool, overlap: bool, page_size: str) -> None:
    name = f"gpu-{graphs}-{overlap}-{page_size}"
    server = qwen3.server(name, *flags(graphs, overlap, page_size, "triton"))
    expected = qwen3.expected(PROMPTS, **LENGTH)
    for ranks in SCRIPTS.values():
        qwen3.script(**({"ranks": ranks} if ranks else {}))
        answers = server.generate(PROMPTS, **LENGTH)
        assert output_ids(answers) == expected
        for answer in answers:
            meta = answer["meta_info"]
            if ranks and ranks[1][0] != -1:
                assert meta["spec_verify_ct"] == 5, "an accepted path was lost"
    server.assert_pool_empty()
    qwen3.stop(name)


@pytest.mark.feature("overlap scheduling")
def test_rounds_in_flight(qwen3: Pair) -> None:
    """Many short requests that join and end in mid-batch, with nothing that waits for the device in between."""
    prompts = [list(b"%d and some more " % i * (1 + i % 5)) for i in range(60)]
    params = [dict(temperature=0, ignore_eos=True, max_new_tokens=3 + 7 * i % 40) for i in range(60)]
    body = {"input_ids": prompts, "sampling_params": params}
    server = qwen3.server("gpu-flight", *flags(True, True, "16", "triton"), env={"DDTREE_TEST_SCRIPT": ""})
    expected = output_ids(qwen3.plain.post("/generate", body))
    for _ in range(3):
        assert output_ids(server.post("/generate", body)) == expected
    server.assert_pool_empty()
    qwen3.stop("gpu-flight")


def test_a_round_never_waits_for_the_device(qwen3: Pair) -> None:
    env = {"DDTREE_TEST_SYNC": "error"}
    server = qwen3.server("gpu-sync", *flags(True, True, "1", "triton"), env=env)
    qwen3.script()
    assert output_ids(server.generate(PROMPTS, **LENGTH)) == qwen3.expected(PROMPTS, **LENGTH)
    mixed = server.generate(PROMPTS, temperature=0.8, top_p=0.9, **LENGTH)
    assert all(len(ids) == 41 for ids in output_ids(mixed))
    qwen3.stop("gpu-sync")


def test_a_number_read_back_would_be_noticed(qwen3: Pair) -> None:
    # The first round is that of the server's own warm-up: it never becomes ready.
    with pytest.raises(ServerDied):
        qwen3.server("gpu-item", *flags(True, True, "1", "triton"), env={"DDTREE_TEST_SYNC": "item"})
    assert "called a synchronizing CUDA operation" in (qwen3.folder / "gpu-item.log").read_text()
