"""Where a request ends within an accepted run: compared with tokens that come one at a time."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.plugins import load_plugins
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

load_plugins()

from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req  # noqa: E402
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402
from sglang_ddtree.stops import end_in_run  # noqa: E402

EOS = tiny_models.EOS_TOKEN_ID


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_models.save_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.additional_stop_token_ids = None  # as SGLang's loader sets it
    return tokenizer


def finish(tokenizer: Any, runs: list[list[int]], update: Any, **params: Any) -> Req:
    """A request that has been given these runs, until it is finished."""
    sampling = SamplingParams(**{"max_new_tokens": 64, **params})
    sampling.normalize(tokenizer)
    req = Req("r", "", [1], sampling, vocab_size=tiny_models.VOCABULARY, eos_token_ids={EOS})
    req.tokenizer = tokenizer
    for run in runs:
        req.output_ids.extend(run)
        update(req, len(run))
        if req.finished():
            break
    return req


def ended(req: Req) -> tuple[Any, ...]:
    return req.finished() and req.finished_reason.to_json(), list(req.output_ids_through_stop)


def in_runs(req: Req, run: int) -> None:
    end_in_run(Req.update_finish_state, req, run)


def ids(tokenizer: Any, text: str) -> list[int]:
    return [EOS if char == "#" else tokenizer.encode(char)[0] for char in text]


# What a run says ("#" is the end of sequence), parameters, what is returned. SGLang alone returns something else.
CASES = [
    ("abc#defg", dict(max_new_tokens=6), "abc#"),
    ("abc#xyz", dict(stop="yz"), "abc#"),
    ("abcdefg", dict(stop=["f", "b"]), "ab"),
    ("abcd", dict(stop_token_ids=[66], stop="d"), "abc"),
    ("abcdefg", dict(max_new_tokens=5, stop="bc"), "abc"),
    ("abcdefg", dict(stop_regex="c$"), "abc"),
]


@pytest.mark.parametrize("said, params, returned", CASES)
def test_the_first_end_wins(tokenizer: Any, said: str, params: dict[str, Any], returned: str) -> None:
    run = ids(tokenizer, said)
    if "stop_token_ids" in params:
        params = {**params, "stop_token_ids": ids(tokenizer, "c")}
    got = finish(tokenizer, [run], in_runs, **params)
    assert list(got.output_ids_through_stop) == ids(tokenizer, returned)
    assert ended(got) == ended(finish(tokenizer, [[token] for token in run], Req.update_finish_state, **params))
    # The KV of the whole run is committed, so the request keeps it.
    assert list(got.output_ids) == run
    assert ended(finish(tokenizer, [run], Req.update_finish_state, **params)) != ended(got)


def test_a_stop_string_before_half_a_character() -> None:
    """Tokenizers with byte fallback decode a line end and the first byte of a character to no line end at all."""
    bytes_of = {f"<0x{byte:02X}>": index for index, byte in enumerate(b"\n\xf0\x9f\x98\x80", start=1)}
    fast = Tokenizer(models.BPE({"a": 0, **bytes_of}, [], byte_fallback=True))
    fast.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast)
    tokenizer.additional_stop_token_ids = None
    runs = [[0, 0, 1, 2], [3, 4, 5]]
    one = finish(tokenizer, [[token] for run in runs for token in run], Req.update_finish_state, stop="\n")
    assert ended(one)[1] == [0, 0, 1]
    assert ended(finish(tokenizer, runs, in_runs, stop="\n")) == ended(one)
    assert ended(finish(tokenizer, runs, Req.update_finish_state, stop="\n")) != ended(one)


def test_nothing_behind_an_abort(tokenizer: Any) -> None:
    """An expression that fails when it is tried ends the request there; most of them are refused before."""

    def failing(update: Any) -> Any:
        def call(req: Req, run: int) -> None:
            req.sampling_params.stop_regex_strs = ["("]
            update(req, run)

        return call

    run = ids(tokenizer, "abc")
    one = finish(tokenizer, [[token] for token in run], failing(Req.update_finish_state), stop_regex="x")
    got = finish(tokenizer, [run], failing(in_runs), stop_regex="x")
    assert one.finished_reason.to_json()["type"] == got.finished_reason.to_json()["type"] == "abort"
    assert list(got.output_ids_through_stop) == list(one.output_ids_through_stop) == run[:1]


words = st.text("abc", min_size=1, max_size=3)


@settings(max_examples=150, deadline=None)
@given(
    runs=st.lists(st.text("abc#", min_size=1, max_size=8), min_size=1, max_size=4),
    stop=st.lists(words, max_size=3),
    expression=st.none() | words.map(lambda word: word + "$") | words,
    token=st.none() | st.sampled_from("abc"),
    limit=st.integers(1, 20),
    ignore_eos=st.booleans(),
)
def test_as_one_token_at_a_time(
    tokenizer: Any,
    runs: list[str],
    stop: list[str],
    expression: str | None,
    token: str | None,
    limit: int,
    ignore_eos: bool,
) -> None:
    params = dict(
        stop=stop,
        stop_regex=expression,
        stop_token_ids=ids(tokenizer, token) if token else None,
        max_new_tokens=limit,
        ignore_eos=ignore_eos,
    )
    said = [ids(tokenizer, run) for run in runs]
    one = finish(tokenizer, [[token] for run in said for token in run], Req.update_finish_state, **params)
    assert ended(finish(tokenizer, said, in_runs, **params)) == ended(one)


def test_an_abort_is_kept_as_it_is(tokenizer: Any) -> None:
    def aborted(req: Req, run: int) -> None:
        req.to_finish = FINISH_ABORT("gone")
        in_runs(req, run)

    req = finish(tokenizer, [ids(tokenizer, "abc#d")], aborted)
    assert req.finished_reason.to_json()["type"] == "abort"
    assert list(req.output_ids) == ids(tokenizer, "abc#d")


def test_reasoning_is_counted_to_the_end_alone(tokenizer: Any) -> None:
    def counted(req: Req, run: int) -> None:
        req.reasoning_tokens += run
        in_runs(req, run)

    assert finish(tokenizer, [ids(tokenizer, "ab"), ids(tokenizer, "abc#d")], counted).reasoning_tokens == 6
