"""Server modes beside the plain one: tensor parallelism, simulated acceptance, chunked prefill, no prefix cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from pairs import BLOCK_SIZE, Pair
from serving import GPU_ENVIRONMENT, HERE, committed_per_round, environment, output_ids

DEPTH = BLOCK_SIZE - 1
PROMPTS = [list(b"hello tree"), list(b"a second, longer prompt"), list(b"0123456789 " * 12)]
LENGTH = dict(max_new_tokens=41, ignore_eos=True)
SIDE = [[0, 1, 0, 0, 0, 0, 0], [1, 0, 0, -1, -1, -1, -1], [-1] * DEPTH]


@pytest.mark.feature("`--tp-size 2`")
@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_ranks(qwen3: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks give the tokens of one, and agree with each other on sampled requests (sglang #33614).

    Ranks that disagreed would commit different lengths and hang or fail at the next collective.
    """
    expected = qwen3.expected(PROMPTS, **LENGTH)
    # SGLang binds each CPU rank's threads; without this it wants a NUMA node per rank.
    cores = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[-1]}")
    server = qwen3.server("tp2", "--speculative-ddtree-budget", "15", "--tp-size", "2")
    for content in ({"ranks": SIDE}, {}):
        qwen3.script(**content)
        assert output_ids(server.generate(PROMPTS, **LENGTH)) == expected
    qwen3.script(ranks=[[0] * DEPTH])
    answers = server.generate(PROMPTS * 4, temperature=1.0, top_p=0.9, **LENGTH)
    assert all(len(ids) == LENGTH["max_new_tokens"] for ids in output_ids(answers))
    server.assert_pool_empty()
    qwen3.stop("tp2")


@pytest.mark.feature("`SGLANG_SIMULATE_ACC_LEN`")
def test_simulated_acceptance(qwen3: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLANG_SIMULATE_ACC_LEN forces the mean of the committed tokens per round, as it does for DFLASH."""
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "3.5")
    server = qwen3.server("simulated", "--speculative-ddtree-budget", "15")
    answers = server.generate(PROMPTS * 5, max_new_tokens=120, ignore_eos=True)
    assert set(answers[0]["meta_info"]["spec_correct_drafts_histogram"][:2]) == {0}
    assert committed_per_round(answers) == pytest.approx(3.5, abs=0.2)
    server.assert_pool_empty()
    qwen3.stop("simulated")


@pytest.mark.feature("chunked prefill, `--disable-radix-cache`")
def test_small_chunks_and_no_prefix_cache(qwen3: Pair) -> None:
    """A prompt that is prefilled in pieces, and served without the prefix cache: the drafter's KV is whole."""
    expected = qwen3.expected(PROMPTS, **LENGTH)
    server = qwen3.server(
        "chunks",
        *("--speculative-ddtree-budget", "15", "--chunked-prefill-size", "16", "--disable-radix-cache"),
    )
    qwen3.script()
    chunked = server.generate(PROMPTS, **LENGTH)
    whole = qwen3.tree.generate(PROMPTS, **LENGTH)
    assert output_ids(chunked) == expected
    key = "spec_correct_drafts_histogram"
    assert [a["meta_info"][key] for a in chunked] == [a["meta_info"][key] for a in whole]
    qwen3.script(ranks=SIDE)
    assert output_ids(server.generate(PROMPTS, **LENGTH)) == expected
    # New weights for the target (here the same ones): the drafter keeps its own, and the server goes on.
    answer = server.post("/update_weights_from_disk", {"model_path": str(qwen3.target)})
    assert answer["success"], answer
    assert output_ids(server.generate(PROMPTS, **LENGTH)) == expected
    qwen3.stop("chunks")


ENGINE = """
import json, sys, time
import safetensors.torch, sglang

if __name__ == "__main__":
    target, drafter, prompts = json.loads(sys.argv[1])
    engine = sglang.Engine(
        model_path=target, dtype="float32", max_total_tokens=4096, random_seed=7,
        speculative_algorithm="DDTREE", speculative_draft_model_path=drafter, speculative_ddtree_budget=7,
    )
    params = {"temperature": 0, "max_new_tokens": 41, "ignore_eos": True}
    answers = engine.generate(input_ids=prompts, sampling_params=params)
    meta = answers[0]["meta_info"]
    rounds = meta["spec_verify_ct"]
    counted = [meta["spec_proposed_drafts"] / rounds, meta["ddtree"]["rounds"] / rounds]
    counted.append(engine.get_server_info()["ddtree"]["budget"])
    # Other weights for the target, and the old ones again: the drafter is not meant.
    name = "model.norm.weight"
    old = safetensors.torch.load_file(target + "/model.safetensors")[name]
    updated = [answers]
    for weights in (-old, old):
        # SGLang's scheduler ends if it is asked before it has noticed that the last request is over.
        time.sleep(2)
        engine.update_weights_from_tensor([(name, weights)])
        updated.append(engine.generate(input_ids=prompts, sampling_params=params))
    print(json.dumps([[[a["output_ids"] for a in answers] for answers in updated], counted]))
    engine.shutdown()
"""


@pytest.mark.feature("`sglang.Engine`")
def test_engine(qwen3: Pair) -> None:
    """The flags as keywords of ``sglang.Engine``, and weights from tensors."""
    expected = qwen3.expected(PROMPTS, **LENGTH)
    script = qwen3.folder / "engine.py"
    script.write_text(ENGINE)
    arguments = json.dumps([str(qwen3.target), str(qwen3.drafter), PROMPTS])
    env = environment({"PYTHONPATH": str(HERE / "plugins"), **GPU_ENVIRONMENT})
    done = subprocess.run(
        [sys.executable, str(script), arguments], capture_output=True, text=True, env=env, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (answers, others, again), counted = json.loads(next(x for x in done.stdout.splitlines() if x.startswith("[[")))
    assert answers == again == expected != others
    assert counted == [7, 1, 7]
