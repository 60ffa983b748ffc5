"""Which requests DDTREE serves; the others get HTTP 400 with the reason, never a silently different answer."""

from typing import Any

import numpy as np

_REMEDY = "Drop it, or use a server without speculation"


def refusal(req: Any) -> str | None:
    """Why ``req`` (an ``sglang`` scheduler ``Req``) cannot be served, None if it can.

    Penalties, ``min_new_tokens`` and custom logit processors depend on the tokens before a node, which differ
    from branch to branch; SGLang's verify applies one value to the whole tree, so they are refused here.
    """
    params = req.sampling_params
    asked = {
        "return_hidden_states": req.return_hidden_states,
        "frequency_penalty": params.frequency_penalty != 0.0,
        "presence_penalty": params.presence_penalty != 0.0,
        "repetition_penalty": params.repetition_penalty != 1.0,
        "min_new_tokens": params.min_new_tokens > 0,
        "custom_logit_processor": req.custom_logit_processor is not None,
        "return_sampling_mask": getattr(req, "return_sampling_mask", False),
        # The next turn's prompt would hold the rest of the run in which this one ended.
        "session_params": req.session is not None,
    }
    for name, present in asked.items():
        if present:
            return message(name)
    return _out_of_bounds(req)


def _out_of_bounds(req: Any) -> str | None:
    """Numbers with which SGLang 0.5.17 fails in mid-batch, and the whole server with it, speculation or not."""
    vocabulary, top = req.vocab_size, req.logprob.top_logprobs_num
    # Long prompts: every running request waits for this.
    ids = np.asarray(req.origin_input_ids)
    if ids.size and not 0 <= ids.min() <= ids.max() < vocabulary:
        return f"input_ids must be from 0 to {vocabulary - 1}, got {ids.min()} to {ids.max()}."
    if not isinstance(top, int) or not 0 <= top <= vocabulary:
        return f"top_logprobs_num must be an integer from 0 to {vocabulary}, got {top}."
    return None


def message(feature: str) -> str:
    """What the client of a refused request reads."""
    return f"DDTREE speculative decoding does not support {feature} yet. {_REMEDY}."
