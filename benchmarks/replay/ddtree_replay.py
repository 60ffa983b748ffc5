"""A benchmark's SGLang plugin: DFLASH and DDTREE with recorded drafts, and a target that says the recorded text.

Random weights of any shape cost what real ones cost but accept nothing. Here every forward, sampler and kernel runs as
ever, and then two of their results are replaced by gathers from device tables: what the drafter proposed, and what
the target chose at every verified position. So real acceptance meets the round's real cost, and no GPU is waited for.

Nothing of this can happen by accident: the plugin is found only with its folder on PYTHONPATH, acts only where
DDTREE_REPLAY names a recording, refuses every ``--load-format`` but ``dummy``, and says so in the log. A seam it needs
and does not find ends the server, at the latest in the first round.

A request says which text it stands for by its first two prompt tokens. Indices: answer token 0 comes from prefill; a
decode round that finds s committed tokens behind a prompt of P has answer token i = s - P as its root, whatever the
random model said there, and row i of the recording as its draft. The target's choice at position p is answer token
p - P + 1.

Letters in shapes: bs requests, D block size, K candidates per position, R rows of the recording, L tokens of the
longest text.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

logger = logging.getLogger(__name__)

VARIABLE = "DDTREE_REPLAY"
WARNING = (
    "REPLAY: drafts and the target's choices come from %s. Every answer is a recorded text, whatever was asked. "
    "This server is a benchmark; it serves nobody."
)


class Recording:
    """The recorded drafts and texts, as tables on a device.

    The file is an npz of ``ids`` int [R, D-1, K] and ``lp`` float [R, D-1, K], candidates best first and their
    natural-log probabilities; ``text`` int [texts, L + 1], the answers, filled up with a token that no candidate is;
    ``lens`` int [texts]; ``base``: prompt tokens (a, b) stand for text a * base + b. A text has lens - 1 rows.

    Args:
        path: of the file.
        device: where the tables go.
    """

    def __init__(self, path: str | Path, device: torch.device | str):
        data = np.load(path)

        def table(values: np.ndarray, dtype: Any) -> torch.Tensor:
            return torch.from_numpy(values.astype(dtype)).to(device)

        self.ids = table(data["ids"], np.int64)
        self.logprobs = table(data["lp"], np.float32)
        lens = data["lens"].astype(np.int64)
        self.texts, self.base = len(lens), int(data["base"])
        self.width = data["text"].shape[1]
        self.text = table(data["text"].reshape(-1), np.int64)
        rows = lens - 1
        assert len(self.ids) == rows.sum(), f"{path}: {len(self.ids)} rows of drafts, {rows.sum()} of texts"
        assert self.width > lens.max(), f"{path}: no filler behind the longest text"
        self.first_row = table(np.concatenate([[0], np.cumsum(rows)[:-1]]), np.int64)
        self.last = table(rows - 1, np.int64)

    def text_of(self, prompt: Any) -> int:
        """The text a prompt's first two tokens stand for; 0 for any other prompt, such as SGLang's own warm-up."""
        number = prompt[0] * self.base + prompt[1] if len(prompt) > 1 else self.texts
        return number if number < self.texts else 0


class Round:
    """Where the requests of one round are in their texts.

    Args:
        recording: of which.
        text, prompt_lens, seq_lens: int64 [bs], the text, tokens of the prompt, and committed tokens before the round.
    """

    def __init__(
        self, recording: Recording, text: torch.Tensor, prompt_lens: torch.Tensor, seq_lens: torch.Tensor
    ) -> None:
        self.recording, self.text, self.prompt_lens = recording, text, prompt_lens
        self.answer = seq_lens.to(torch.int64) - prompt_lens
        self.drafted = self.chosen = False

    def drafts(self, depth: int, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Candidates of block positions 1..depth, int64 [bs, depth, topk], and log-probabilities, float32."""
        recording = self.recording
        have = recording.ids.shape[1:]
        if depth > have[0] or topk > have[1]:
            raise RuntimeError(
                f"REPLAY: {depth} positions of {topk} candidates were asked for, {tuple(have)} recorded."
            )
        # Past its end a request may run for one more round, whose result nobody reads.
        rows = recording.first_row[self.text] + torch.minimum(self.answer.clamp(min=0), recording.last[self.text])
        self.drafted = True
        return (
            recording.ids.index_select(0, rows)[:, :depth, :topk].contiguous(),
            recording.logprobs.index_select(0, rows)[:, :depth, :topk].contiguous(),
        )

    def choices(self, positions: torch.Tensor, num_nodes: int, owners: torch.Tensor | None = None) -> torch.Tensor:
        """What the text says after every verified node.

        A node off the text's path gets the token of its depth too; no walk comes there.

        Args:
            positions: int64 [bs * num_nodes], absolute; packed [T].
            num_nodes: of every request; packed 1.
            owners: of a packed round int64 [T], the request of every row.
        Returns:
            int64 [bs, num_nodes]; packed [T, 1].
        """
        text, prompt_lens = self.text, self.prompt_lens
        if owners is not None:
            text, prompt_lens = text.index_select(0, owners), prompt_lens.index_select(0, owners)
        index = positions.view(-1, num_nodes) - prompt_lens[:, None] + 1
        return self._tokens(text, index)

    def chain_choices(self, width: int) -> torch.Tensor:
        """What the text says after every token of a block, int64 [bs, width]."""
        index = self.answer[:, None] + torch.arange(1, width + 1, device=self.answer.device)
        return self._tokens(self.text, index)

    def _tokens(self, text: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Answer tokens ``index`` [n, m] of ``text`` [n]; past an answer's end the filler, which matches no draft."""
        self.chosen = True
        width = self.recording.width
        return self.recording.text[text[:, None] * width + index.clamp(0, width - 1)]


class Session:
    """The one recording of this process, the texts of its running requests, and the round under way."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.recording: Recording | None = None
        # int64 [request slots, 2]: the text and the prompt's length; written by prefill, read by every round.
        self.slots: torch.Tensor | None = None
        self.round: Round | None = None

    def check(self, server_args: Any) -> None:
        load_format = getattr(server_args.load_format, "value", server_args.load_format)
        if load_format != "dummy":
            raise RuntimeError(f"REPLAY: --load-format must be dummy, got {load_format}; unset {VARIABLE} to serve.")
        if os.environ.get("SGLANG_SIMULATE_ACC_LEN"):
            raise RuntimeError("REPLAY: SGLANG_SIMULATE_ACC_LEN would decide over the recorded acceptance; unset it.")
        logger.warning(WARNING, self.path)

    def admit(self, worker: Any, batch: Any) -> None:
        """Remember the texts of a prefill's requests. Mutates the table, on the stream of the rounds."""
        device = batch.req_pool_indices.device
        if self.slots is None:
            self.recording = Recording(self.path, device)
            pool = worker.model_runner.req_to_token_pool.req_to_token.shape[0]
            self.slots = torch.zeros((pool, 2), dtype=torch.int64, device=device)
        assert self.recording is not None
        values = [(self.recording.text_of(req.origin_input_ids), len(req.origin_input_ids)) for req in batch.reqs]
        # Pinned, so that the copy waits for nothing.
        host = torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.slots.index_copy_(0, batch.req_pool_indices.to(torch.int64), host.to(device, non_blocking=True))

    def begin(self, batch: Any) -> None:
        if self.slots is None or self.recording is None:
            raise RuntimeError("REPLAY: a round before the first prefill; how requests are admitted has changed.")
        if not batch.sampling_info.is_all_greedy:
            raise RuntimeError("REPLAY: a recorded answer is greedy; send temperature 0.")
        where = self.slots.index_select(0, batch.req_pool_indices.to(torch.int64))
        self.round = Round(self.recording, where[:, 0], where[:, 1], batch.seq_lens)

    def end(self) -> Round:
        current, self.round = self.round, None
        assert current is not None, "no round was begun"
        return current


def _seam(owner: Any, name: str, *parameters: str) -> Callable[..., Any]:
    """``owner.name``, which must be a function that takes these parameters.

    Raises:
        RuntimeError: it is not.
    """
    function = getattr(owner, name, None)
    where = f"{getattr(owner, '__name__', owner)}.{name}"
    if not callable(function):
        raise RuntimeError(f"REPLAY: there is no {where} to replace; the plugin knows another version.")
    missing = set(parameters) - set(inspect.signature(function).parameters)
    if missing:
        raise RuntimeError(f"REPLAY: {where} takes no {', '.join(sorted(missing))}; the plugin knows another version.")
    return function


def _wrap_worker(worker_class: Any, session: Session, drafts_always: bool) -> None:
    """Checks at start, and a `Round` around every decode round. ``drafts_always``: no round goes without a draft."""
    init, forward = _seam(worker_class, "__init__"), _seam(worker_class, "forward_batch_generation", "batch")

    def checked_init(worker: Any, *args: Any, **kwargs: Any) -> None:
        init(worker, *args, **kwargs)
        session.check(worker.server_args)

    def replayed(worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if batch.forward_mode.is_idle():
            return forward(worker, batch, *args, **kwargs)
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            session.admit(worker, batch)
            return forward(worker, batch, *args, **kwargs)
        session.begin(batch)
        try:
            result = forward(worker, batch, *args, **kwargs)
        finally:
            current = session.end()
        if not current.chosen or (drafts_always and not current.drafted):
            raise RuntimeError("REPLAY: a round passed by the recording; the worker's seams have changed.")
        return result

    worker_class.__init__, worker_class.forward_batch_generation = checked_init, replayed


def install_ddtree(module: Any, session: Session) -> None:
    """Replace the candidates and the choices of ``ddtree_worker``, the module."""
    worker_class = module.DDTreeWorker
    draft = _seam(worker_class, "_draft", "batch", "bonus_tokens")
    choose = _seam(worker_class, "_choose", "forward_batch", "packed")
    takes = inspect.signature(choose)

    def recorded_draft(worker: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ids, logprobs = draft(worker, *args, **kwargs)
        if session.round is None:
            return ids, logprobs
        return session.round.drafts(*ids.shape[1:])

    def recorded_choices(*args: Any, **kwargs: Any) -> tuple[Any, torch.Tensor]:
        logits_output, choices = choose(*args, **kwargs)
        if session.round is not None:
            given = takes.bind(*args, **kwargs).arguments
            packed = given["packed"]
            owners = None if packed is None else packed.row_owners()
            positions = given["forward_batch"].spec_info.positions
            # In place: what follows may be a graph that reads them where they are.
            choices.copy_(session.round.choices(positions, choices.shape[1], owners))
        return logits_output, choices

    worker_class._draft, worker_class._choose = recorded_draft, recorded_choices
    _wrap_worker(worker_class, session, drafts_always=False)


def install_dflash(module: Any, session: Session) -> None:
    """Replace the drafts and the predictions of ``dflash_worker_v2``, the module."""
    worker_class = module.DFlashWorkerV2
    sample = _seam(worker_class, "_greedy_sample_from_vocab_parallel_head", "hidden_states", "lm_head")
    init_graphs = _seam(worker_class, "init_cuda_graphs")
    fused = _seam(module, "_compute_dflash_accept_bonus_triton_unchecked", "candidates", "target_top1")
    plain = _seam(module, "compute_dflash_correct_drafts_and_bonus", "candidates", "target_predict")

    def drafts(worker: Any) -> torch.Tensor:
        """int64 [bs * (D - 1)], what the recorded drafter likes best."""
        assert session.round is not None
        return session.round.drafts(int(worker.block_size) - 1, 1)[0].view(-1)

    def recorded_sample(worker: Any, **kwargs: Any) -> torch.Tensor:
        tokens = sample(worker, **kwargs)
        if session.round is None:
            return tokens
        recorded = drafts(worker)
        assert recorded.shape == tokens.shape, f"drafts of shape {tokens.shape}, replayed {recorded.shape}"
        return recorded

    def with_recorded_graphs(worker: Any, *args: Any, **kwargs: Any) -> None:
        init_graphs(worker, *args, **kwargs)
        sampler, runner = worker._draft_sampler, worker.draft_model_runner
        if sampler is None:
            return  # every draft is sampled eagerly
        if not isinstance(getattr(sampler, "out", None), torch.Tensor):
            raise RuntimeError("REPLAY: the drafter's graph leaves no tokens in _draft_sampler.out.")
        forward = _seam(runner, "forward", "forward_batch")

        def then_recorded(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            if session.round is not None and output.can_run_graph:
                # Behind the graph on the same stream, before the worker reads it.
                tokens = drafts(worker)
                sampler.out[: tokens.shape[0]].copy_(tokens)
            return output

        runner.forward = then_recorded

    def predicted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def accept(**kwargs: Any) -> Any:
            if session.round is not None:
                own = kwargs[name]
                recorded = session.round.chain_choices(own.shape[1])
                assert recorded.shape == own.shape, f"predictions of shape {own.shape}, replayed {recorded.shape}"
                kwargs[name] = recorded.to(own.dtype)
            return function(**kwargs)

        return accept

    worker_class._greedy_sample_from_vocab_parallel_head = recorded_sample
    worker_class.init_cuda_graphs = with_recorded_graphs
    module._compute_dflash_accept_bonus_triton_unchecked = predicted("target_top1", fused)
    module.compute_dflash_correct_drafts_and_bonus = predicted("target_predict", plain)
    _wrap_worker(worker_class, session, drafts_always=True)


_installed = False


def _once(install: Callable[[], None]) -> None:
    global _installed
    if not _installed:
        install()
        _installed = True


def _activated(result: Any, session: Session) -> None:
    """DDTREE's overlay has been laid, and its worker is about to be made."""

    def install() -> None:
        from sglang.srt.speculative import ddtree_worker

        install_ddtree(ddtree_worker, session)

    _once(install)


def _worker_created(original: Callable[..., Any], session: Session, algorithm: Any, server_args: Any) -> Any:
    """One of SGLang's own algorithms is about to make its worker."""
    worker = original(algorithm, server_args)
    if not algorithm.is_dflash():
        raise RuntimeError(f"REPLAY: knows DFLASH and DDTREE, not {algorithm}; unset {VARIABLE}.")

    def install() -> None:
        from sglang.srt.speculative import dflash_worker_v2

        install_dflash(dflash_worker_v2, session)

    _once(install)
    return worker


def load() -> None:
    path = os.environ.get(VARIABLE)
    if not path:
        return
    if not Path(path).is_file():
        # SGLang swallows a plugin's exceptions, but not this one.
        raise SystemExit(f"REPLAY: {VARIABLE} must name a recording, there is none at {path}.")
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    session = Session(path)
    HookRegistry.register(
        "sglang_ddtree.activation.activate", lambda result: _activated(result, session), HookType.AFTER
    )
    HookRegistry.register(
        "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker",
        lambda original, algorithm, server_args: _worker_created(original, session, algorithm, server_args),
        HookType.AROUND,
    )
    logger.warning(WARNING, path)
