"""Which requests DDTREE refuses, and in which words."""

import inspect
from types import SimpleNamespace

import pytest
from sglang.srt.plugins import load_plugins

load_plugins()

from sglang.srt.managers.schedule_batch import Req  # noqa: E402
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402
from sglang_ddtree import activation  # noqa: E402
from sglang_ddtree.requests import refusal  # noqa: E402


def make_request(params=None, **fields):
    """A scheduler request with SGLang's own sampling parameters."""
    defaults = dict(
        return_logprob=False,
        return_hidden_states=False,
        custom_logit_processor=None,
        return_sampling_mask=False,
        session=None,
        vocab_size=320,
        origin_input_ids=[1, 2, 3],
        logprob=SimpleNamespace(top_logprobs_num=0),
    )
    return SimpleNamespace(sampling_params=SamplingParams(**(params or {})), **(defaults | fields))


SERVED = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.05},
    {"sampling_seed": 7},
    {"logit_bias": {"3": 2.0}},
    {"stop": ["x"], "ignore_eos": True, "max_new_tokens": 1},
    {"json_schema": "{}"},
    {"regex": "a+"},
    {"ebnf": 'root ::= "a"'},
    {"structural_tag": "{}"},
    # Null means default.
    {"frequency_penalty": None, "presence_penalty": None, "repetition_penalty": None, "min_new_tokens": None},
]

REFUSED_PARAMS = [
    ("frequency_penalty", 0.1),
    ("frequency_penalty", -0.1),
    ("presence_penalty", 0.1),
    ("presence_penalty", -2.0),
    ("repetition_penalty", 1.05),
    ("repetition_penalty", 0.9),
    ("min_new_tokens", 1),
]

REFUSED_FIELDS = [
    ("return_hidden_states", True, "return_hidden_states"),
    ("custom_logit_processor", "{...}", "custom_logit_processor"),
    ("return_sampling_mask", True, "return_sampling_mask"),
    ("session", object(), "session_params"),
]


@pytest.mark.parametrize("params", SERVED, ids=str)
def test_served(params):
    assert refusal(make_request(params)) is None


@pytest.mark.parametrize("name, value", REFUSED_PARAMS)
def test_refused_sampling_parameters(name, value):
    assert refusal(make_request({name: value})) == (
        f"DDTREE speculative decoding does not support {name} yet. Drop it, or use a server without speculation."
    )


@pytest.mark.parametrize("field, value, name", REFUSED_FIELDS)
def test_refused_features(field, value, name):
    assert refusal(make_request(**{field: value})) == (
        f"DDTREE speculative decoding does not support {name} yet. Drop it, or use a server without speculation."
    )


@pytest.mark.parametrize(
    "ids, top, message",
    [
        ([5, 320, 1], 0, "input_ids must be from 0 to 319, got 1 to 320."),
        ([5, -1], 0, "input_ids must be from 0 to 319, got -1 to 5."),
        ([5], 321, "top_logprobs_num must be an integer from 0 to 320, got 321."),
        ([5], -1, "top_logprobs_num must be an integer from 0 to 320, got -1."),
        # A list passes SGLang's own checks of a single request.
        ([5], [2], "top_logprobs_num must be an integer from 0 to 320, got [2]."),
        ([5], None, "top_logprobs_num must be an integer from 0 to 320, got None."),
        ([0, 319], 320, None),
        ([], 0, None),
    ],
)
def test_numbers_out_of_bounds(ids, top, message):
    request = Req("r", "", ids, SamplingParams(), vocab_size=320, return_logprob=True, top_logprobs_num=top)
    assert activation._validate_request_hook(None, request, True) == message
    # What is refused is harmless in a batch with others.
    assert request.logprob.top_logprobs_num == (0 if message else top)


def test_a_refused_feature_beside_served_ones_is_still_found():
    request = make_request({"temperature": 0.5, "logit_bias": {"1": 1.0}, "presence_penalty": 0.5})
    assert "presence_penalty" in refusal(request)


def test_a_real_request_has_every_field_that_is_read():
    """With a renamed field of Req the refusal would crash the scheduler or, with a default, be silent."""
    source = inspect.getsource(Req.__init__)
    for field in make_request().__dict__:
        assert f"self.{field}" in source, field
    request = Req("r", "", [1, 2, 3], SamplingParams(), vocab_size=320)
    assert refusal(request) is None
    assert refusal(Req("r", "", [1, 2, 3], SamplingParams(), vocab_size=320, return_logprob=True)) is None
    request = Req("r", "", [1, 2, 3], SamplingParams(), vocab_size=320, return_sampling_mask=True)
    assert "return_sampling_mask" in refusal(request)


@pytest.mark.parametrize("enable_overlap", [True, False])
def test_the_hook_replaces_dflashs_own_check(enable_overlap):
    def original(req, enable_overlap):
        return "DFLASH says no"

    hook = activation._validate_request_hook
    assert hook(original, make_request(), enable_overlap) is None
    assert "return_hidden_states" in hook(original, make_request(return_hidden_states=True), enable_overlap)
