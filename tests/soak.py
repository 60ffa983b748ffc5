"""A long run under mixed load: every greedy answer is compared with no speculation, nothing may leak or mix.

    make soak                      # 20 minutes on a CPU, 8 on a GPU
    python tests/soak.py --minutes 2

Two float32 servers of the SmolLM2 pair: one without speculation answers every greedy case once beforehand; then clients
load the one with DDTREE with requests of all kinds at random: greedy and sampled, prompts that share long prefixes,
stop strings, stop tokens, short limits, answers read as a stream, connections closed in mid-answer. Every prompt holds
a marker of its own, and no answer may hold another prompt's. At the end the KV pool must be empty.

Exit code 1 if anything differs. A greedy answer may leave the expected one only where the target itself is undecided:
the two tokens' log-probabilities differ by less than TIE (sums in another order).
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import random
import sys
import tempfile
import threading
import time
import traceback
import urllib.request
from pathlib import Path
from typing import Any

import torch
from serving import GPU_ENVIRONMENT, HERE, Server

ROOT = HERE.parent
TIE = 2e-4
FLAGS = ("--dtype", "float32", "--max-total-tokens", "12000", "--max-running-requests", "8")
TOPICS = ("rivers", "prime numbers", "bread", "the night sky")
SAMPLED = (
    dict(temperature=0.8, top_p=0.9),
    dict(temperature=1.2, top_k=20),
    dict(temperature=0.6, min_p=0.1),
    dict(temperature=1.0, top_p=0.7, top_k=50, min_p=0.02),
)


@dataclasses.dataclass
class Case:
    """One greedy request, and what it must be answered."""

    marker: str
    input_ids: list[int]
    params: dict[str, Any]
    expected: dict[str, Any]


def ask(server: Server, input_ids: list[int], params: dict[str, Any], **more: Any) -> dict[str, Any]:
    return server.post("/generate", {"input_ids": input_ids, "sampling_params": params, **more})


def make_cases(plain: Server, target: Path, count: int, rng: random.Random) -> list[Case]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    cases = []
    for index in range(count):
        marker = "".join(rng.choices("BCDFGHJKLMNPQRSTVWXZ", k=6)) + str(index)
        system = f"You know everything about {TOPICS[index % len(TOPICS)]}. " * 12
        messages = [
            {"role": "system", "content": system},
            {"role": "user", "content": f"My code is {marker}. Repeat my code {marker}, then write three sentences."},
        ]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False).input_ids
        params: dict[str, Any] = dict(temperature=0, max_new_tokens=48)
        free = ask(plain, ids, params)
        kind = index % 4
        if kind == 1:
            params["max_new_tokens"] = rng.randint(1, 20)
        elif kind == 2 and len(free["text"]) > 30:
            at = rng.randint(8, 24)
            params["stop"] = free["text"][at : at + 4]
        elif kind == 3 and len(free["output_ids"]) > 12:
            params["stop_token_ids"] = [rng.choice(free["output_ids"][4:12])]
        cases.append(Case(marker, ids, params, ask(plain, ids, params)))
    return cases


def undecided(plain: Server, case: Case, got: list[int]) -> bool:
    """Whether the target's log-probabilities of the two tokens are as good as equal where the answers part."""
    want = case.expected["output_ids"]
    at = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), None)
    if at is None:
        return False
    prefix, pair = case.input_ids + want[:at], [got[at], want[at]]
    answer = ask(plain, prefix, dict(temperature=0, max_new_tokens=1), return_logprob=True, token_ids_logprob=pair)
    first, second = (entry[0] for entry in answer["meta_info"]["output_token_ids_logprobs"][0])
    return abs(first - second) < TIE


class Soak:
    """The clients and what they found."""

    def __init__(self, tree: Server, plain: Server, cases: list[Case], deadline: float):
        self.tree, self.plain, self.cases, self.deadline = tree, plain, cases, deadline
        self.counts: collections.Counter[str] = collections.Counter()
        self.problems: list[str] = []

    def client(self, seed: int) -> None:
        rng = random.Random(seed)
        while time.monotonic() < self.deadline and len(self.problems) < 20:
            kind = rng.choices(("greedy", "streamed", "sampled", "dropped"), (45, 15, 25, 15))[0]
            try:
                getattr(self, kind)(rng.choice(self.cases), rng)
                self.counts[kind] += 1
            except Exception:
                self.problems.append(f"{kind}: {traceback.format_exc()}")
                return

    def check_markers(self, case: Case, text: str) -> None:
        strangers = [other.marker for other in self.cases if other is not case and other.marker in text]
        if strangers:
            self.problems.append(f"the answer to {case.marker} holds {strangers}: {text!r}")

    def check_greedy(self, case: Case, ids: list[int], text: str, reason: Any) -> None:
        self.check_markers(case, text)
        want = case.expected
        if ids == want["output_ids"] and text == want["text"] and reason == want["meta_info"]["finish_reason"]:
            return
        if undecided(self.plain, case, ids):
            self.counts["undecided by the target"] += 1
            return
        self.problems.append(f"{case.params}: got {ids} {text!r} {reason}, expected {want}")

    def greedy(self, case: Case, rng: random.Random) -> None:
        answer = ask(self.tree, case.input_ids, case.params)
        self.check_greedy(case, answer["output_ids"], answer["text"], answer["meta_info"]["finish_reason"])

    def stream(self, case: Case, params: dict[str, Any], chunks: int | None) -> list[dict[str, Any]]:
        """The chunks of a streamed answer; closes the connection after as many as given."""
        body = {"input_ids": case.input_ids, "sampling_params": params, "stream": True}
        request = urllib.request.Request(
            self.tree.url + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        found: list[dict[str, Any]] = []
        with urllib.request.urlopen(request, timeout=600) as response:
            for line in response:
                data = line.decode().removeprefix("data: ").strip()
                if data == "[DONE]" or (chunks is not None and len(found) >= chunks):
                    break
                if data:
                    found.append(json.loads(data))
        return found

    def streamed(self, case: Case, rng: random.Random) -> None:
        chunks = self.stream(case, case.params, None)
        for before, after in zip(chunks, chunks[1:], strict=False):
            if not after["text"].startswith(before["text"].rstrip("\ufffd")):
                self.problems.append(f"chunks out of order: {before['text']!r}, {after['text']!r}")
        # Every chunk holds all so far.
        last = chunks[-1]
        self.check_greedy(case, last["output_ids"], last["text"], last["meta_info"]["finish_reason"])

    def sampled(self, case: Case, rng: random.Random) -> None:
        tokens = rng.randint(4, 48)
        answer = ask(self.tree, case.input_ids, {**rng.choice(SAMPLED), "max_new_tokens": tokens})
        self.check_markers(case, answer["text"])
        if not 1 <= len(answer["output_ids"]) <= tokens:
            self.problems.append(f"{len(answer['output_ids'])} tokens where at most {tokens} were asked for")

    def dropped(self, case: Case, rng: random.Random) -> None:
        """The client goes away in mid-answer."""
        for chunk in self.stream(
            case, {"temperature": 0, "max_new_tokens": 200, "ignore_eos": True}, rng.randint(1, 6)
        ):
            self.check_markers(case, chunk["text"])


def run(args: argparse.Namespace, folder: Path) -> int:
    target = ["--model-path", str(args.target), *FLAGS]
    env = {"PYTHONPATH": str(HERE / "plugins"), **GPU_ENVIRONMENT}
    drafting = ["--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", str(args.drafter)]
    plain = Server(target, folder / "plain.log", env=env)
    tree = None
    try:
        plain.wait_ready()
        cases = make_cases(plain, args.target, args.cases, random.Random(args.seed))
        tree = Server([*target, *drafting, *args.flags], folder / "tree.log", env=env)
        tree.wait_ready()
        soak = Soak(tree, plain, cases, time.monotonic() + args.minutes * 60)
        clients = [threading.Thread(target=soak.client, args=(args.seed + i,)) for i in range(args.clients)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        tree.assert_pool_empty()
    finally:
        for server in (plain, tree):
            if server is not None:
                server.stop()
    print(f"{args.minutes:g} minutes, {args.clients} clients, {len(cases)} prompts: {dict(soak.counts)}")
    for problem in soak.problems:
        print("PROBLEM", problem)
    compared = soak.counts["greedy"] + soak.counts["streamed"]
    if not compared:
        print("PROBLEM not one greedy answer was compared")
    return 1 if soak.problems or not compared else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, default=ROOT / "models" / "SmolLM2-135M-Instruct")
    parser.add_argument("--drafter", type=Path, default=ROOT / "models" / "smollm2-135m-dflash")
    parser.add_argument("--minutes", type=float, default=8 if torch.cuda.is_available() else 20)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--cases", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("flags", nargs="*", help="after --, flags for the DDTREE server")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            return run(args, Path(folder))
        except Exception:
            for log in sorted(Path(folder).glob("*.log")):
                print(f"--- the end of {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-30:]))
            raise


if __name__ == "__main__":
    sys.exit(main())
