"""A test-only SGLang plugin: a drafter that knows what the target will say.

A random drafter is almost never accepted and exercises nothing. This one runs beside the real drafter (which
still drafts, so its KV cache is exercised) and replaces its candidates by a script, read anew when the file
named by DDTREE_TEST_SCRIPT changes:

- ``{}``: the real drafter's candidates.
- ``{"ranks": [[0, 1, ...], ...]}``: one list per round, used in turn by each request. Its entry at index d - 1 is
  the rank at which the target's own greedy token stands at block position d; -1: it is no candidate there.
  With ``"spread": s`` at least the s first ranks of every position are equally likely, which makes a tree wide.
- ``{"fixed": [[token, ...], ...], "logprobs": [...]}``: these candidates at each position, whatever the target says.

The target's continuation comes from transformers on the same checkpoint (DDTREE_TEST_TARGET); or with ``"known":
[[token, ...], ...]`` beside the ranks from these sequences, of which a request's tokens should be a beginning.
"""

import json
import os
from pathlib import Path

import torch

_FAR = -20.0


class Continuations:
    """The target's greedy continuation of any prefix, computed with transformers and remembered."""

    def __init__(self, path: str):
        self.next_token: dict[tuple[int, ...], int] = {}
        if not path:
            return  # what follows will be known
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    @torch.inference_mode()
    def after(self, prefix: tuple[int, ...]) -> int:
        if prefix not in self.next_token:
            logits = self.model(torch.tensor([prefix])).logits[0, -1]
            self.next_token[prefix] = int(logits.argmax())
        return self.next_token[prefix]


def following(known: list[list[int]], prefix: tuple[int, ...]) -> int:
    """The token after ``prefix`` in the sequence that begins with it; 0 where there is none, as past its end."""
    for sequence in known:
        if len(sequence) > len(prefix) and tuple(sequence[: len(prefix)]) == prefix:
            return sequence[len(prefix)]
    return 0


class Script:
    def __init__(self, path: str, target: str):
        self.path = Path(path)
        self.stamp: int | None = None
        self.content: dict = {}
        self.rounds: dict[str, int] = {}
        # What the worker committed for each request: under overlap scheduling the request itself lags behind.
        self.committed: dict[str, tuple[int, ...]] = {}
        self.continuations = Continuations(target)

    def refresh(self) -> dict:
        stamp = self.path.stat().st_mtime_ns
        if stamp != self.stamp:
            self.stamp, self.content, self.rounds = stamp, json.loads(self.path.read_text()), {}
        return self.content

    def candidates(self, req, positions: int, width: int) -> tuple[list[list[int]], list[list[float]]]:
        """Tokens and log-probabilities, [positions][width], for one request's next round."""
        turn = self.rounds.get(req.rid, 0)
        self.rounds[req.rid] = turn + 1
        plan = self.content["ranks"][turn % len(self.content["ranks"])]
        prefix = (*req.origin_input_ids, *self.committed[req.rid])
        tokens, logprobs = [], []
        known = self.content.get("known")
        for position in range(positions):
            truth = following(known, prefix) if known else self.continuations.after(prefix)
            prefix = (*prefix, truth)
            rank = plan[position] if position < len(plan) else -1
            # Tokens that differ from the truth and from each other.
            row = [(truth + 1 + i) % 256 for i in range(width)]
            if truth > 255:
                row = list(range(width))
            # The ranks down to the chosen one are equally likely, the rest is far behind: so the tree holds
            # the path through that rank whatever its shape.
            upto = max(rank, self.content.get("spread", 1) - 1)
            share = float(-torch.log(torch.tensor(float(upto + 1))))
            if 0 <= rank < width:
                row[rank] = truth
            tokens.append(row)
            logprobs.append([share if i <= upto else _FAR - i for i in range(width)])
        return tokens, logprobs


def _scripted(draft, script: Script):
    def wrapper(worker, batch, bonus_tokens, width):
        ids, logprobs = draft(worker, batch, bonus_tokens, width)
        content = script.refresh()
        if not content:
            return ids, logprobs
        ids, logprobs = ids.clone(), logprobs.clone()
        bs, positions, width = ids.shape
        for b, req in enumerate(batch.reqs):
            if "fixed" in content:
                row = torch.tensor(content["fixed"])[:, :width]
                logs = torch.tensor(content["logprobs"])[:, :width]
                ids[b], logprobs[b] = row.to(ids), logs.to(logprobs)
                continue
            if req.rid not in script.committed:
                # A request from before the script, in the round that overlap had under way when it ended.
                continue
            assert script.committed[req.rid][-1] == int(bonus_tokens[b]), "the bonus token is the request's last"
            tokens, values = script.candidates(req, positions, width)
            ids[b] = torch.tensor(tokens).to(ids)
            logprobs[b] = torch.tensor(values).to(logprobs)
        return ids, logprobs

    return wrapper


def _recorded(forward, script: Script):
    def wrapper(worker, batch, *args, **kwargs):
        if not script.refresh():
            # Nothing is scripted: what the worker commits need not be known, and nothing waits for it here.
            return forward(worker, batch, *args, **kwargs)
        prefill = batch.forward_mode.is_extend() or batch.is_extend_in_batch
        outputs = [tuple(req.output_ids) for req in batch.reqs]
        result = forward(worker, batch, *args, **kwargs)
        if batch.forward_mode.is_idle():
            return result
        tokens = result.next_token_ids.view(len(batch.reqs), -1).tolist()
        lengths = [1] * len(batch.reqs) if prefill else result.accept_lens.tolist()
        for req, before, row, length in zip(batch.reqs, outputs, tokens, lengths, strict=True):
            earlier = before if prefill else script.committed.get(req.rid)
            if earlier is not None:
                script.committed[req.rid] = (*earlier, *row[:length])
        return result

    return wrapper


def _after_activate(result) -> None:
    from sglang.srt.speculative.ddtree_worker import DDTreeWorker

    script = Script(os.environ["DDTREE_TEST_SCRIPT"], os.environ["DDTREE_TEST_TARGET"])
    DDTreeWorker._draft = _scripted(DDTreeWorker._draft, script)
    DDTreeWorker.forward_batch_generation = _recorded(DDTreeWorker.forward_batch_generation, script)


def load() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if os.environ.get("DDTREE_TEST_SCRIPT"):
        HookRegistry.register("sglang_ddtree.activation.activate", _after_activate, HookType.AFTER)
