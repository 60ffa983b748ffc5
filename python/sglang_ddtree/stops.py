"""Where a request ends within an accepted run: at the token at which it would end one token at a time.

SGLang looks at a run as a whole. Its length limit then hides an end of sequence that came before it, a stop string
hides an end of sequence before it, and of two stop strings the first in the request's list wins, not in the text.
"""

from collections.abc import Callable
from typing import Any


def end_in_run(update: Callable[[Any, int], None], req: Any, run: int) -> None:
    """Decide whether ``req`` is finished, and where. Mutates ``req``.

    Args:
        update: SGLang's ``Req.update_finish_state``.
        req: its last ``run`` output ids are new.
        run: committed tokens of this round, at least 1.
    """
    if run == 1 or req.finished() or req.to_finish is not None:
        update(req, run)
        return
    tokens = req.output_ids[-run:]
    # A text may match in mid-run and no longer at the run's end: an expression with "$", or a string before the first
    # bytes of a character, which some tokenizers decode to nothing but replacement characters. A token stays.
    if not (req.sampling_params.stop_regex_strs or req.sampling_params.stop_strs):
        update(req, run)
        if not req.finished():
            return
        req.finished_reason = req.finished_len = None
    # The grammar has been advanced to the end of the run already, so only there its state means anything.
    grammar, req.grammar = req.grammar, None
    del req.output_ids[-run:]
    for place, token in enumerate(tokens, start=1):
        req.output_ids.append(token)
        if place == run:
            req.grammar = grammar
        update(req, 1)
        if req.finished():
            break
    req.grammar = grammar
    if req.finished():
        if req.finished_len is None:
            # An abort, of an expression that cannot be compiled.
            req.finished_len = len(req.output_ids)
        # Counted over the whole run before its end was known.
        req.reasoning_tokens = min(req.reasoning_tokens, req.finished_len)
    # The KV of the whole run is committed: what follows the end is dropped from the answer, not from the request.
    req.output_ids.extend(tokens[place:])
