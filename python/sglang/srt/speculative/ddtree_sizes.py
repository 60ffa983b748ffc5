"""Sizes of rounds under `--speculative-ddtree-budget auto`: totals of verify tokens, nodes per request, draft widths.

Each costs graphs, and memory for them. The standard library only.
"""

from __future__ import annotations

_MOST_BUCKETS = 24
# The most verify tokens of a round, whatever the requests; for many requests, per request, and where that ends.
_MOST_TOKENS, _TOKENS_PER_REQUEST, _MANY_TOKENS = 1024, 16, 2048
_LEAST_WIDTH = 4
# Nodes per request of uniform rounds.
_UNIFORM_WIDTHS = (1, 4, 8, 16, 32, 64)


def token_buckets(max_requests: int, max_budget: int) -> tuple[int, ...]:
    """Totals of verify tokens to capture, roots counted, ascending; at most 24 of them.

    Powers of two, and halves and quarters of an octave between them as far as the number allows: fine steps waste
    less, and these are where a matrix product's tiles end. They go up to `most_tokens`. The widest tree of one request
    and the roots of all requests are among them; above 64 tokens all are multiples of 8.

    Args:
        max_requests: running at once, at least 1.
        max_budget: drafted nodes per request, at least 1.

    Raises:
        ValueError: an argument is below 1.
    """
    if max_requests < 1 or max_budget < 1:
        raise ValueError(f"needs a request and a node, got max_requests {max_requests} and max_budget {max_budget}.")
    most = most_tokens(max_requests, max_budget)
    roots = max_requests if max_requests <= 64 else _round_up(max_requests, 8)
    chosen = {most, min(max_budget + 1, most), min(roots, most)}
    octaves = [2**power for power in range(most.bit_length())]
    chosen.update(octaves)
    halves = [low + low // 2 for low in octaves if low >= 16]
    quarters = [low + low // 4 * part for low in octaves if low >= 16 for part in (1, 3)]

    # Up to about 64 tokens a verify does little but read the weights; above 1024 few rounds pay.
    def rank(tokens: int) -> int:
        return 0 if tokens in halves and tokens > 64 else 1 if 128 < tokens < 1024 else 2 if tokens in halves else 3

    for tokens in sorted({*halves, *quarters}, key=lambda tokens: (rank(tokens), tokens)):
        if tokens < most and len(chosen) < _MOST_BUCKETS and (tokens <= 64 or tokens % 8 == 0):
            chosen.add(tokens)
    return tuple(sorted(chosen))


def most_tokens(max_requests: int, max_budget: int) -> int:
    """The most verify tokens that a round can have: all nodes, but not more than 1024, or 16 for each request up to
    2048, or four for each request.

    A large model computes by then, and what it computes is nearly all rejected; a small one may still be waiting for
    its launches. The logits of the rows take memory as well.
    """
    many = max(min(_TOKENS_PER_REQUEST * max_requests, _MANY_TOKENS), _round_up(4 * max_requests, 8))
    most = min(max_requests * (max_budget + 1), max(_MOST_TOKENS, many))
    return most - most % 8 if most > 64 else most


def uniform_widths(max_budget: int) -> tuple[int, ...]:
    """Nodes per request, the root counted, that a uniform round may have, ascending; the last is the widest tree's.

    The first is the root alone, a plain round's.
    """
    most = max_budget + 1
    return (*(width for width in _UNIFORM_WIDTHS if width < most), most)


def request_grid(max_requests: int) -> tuple[int, ...]:
    """Numbers of running requests to measure: powers of two, and the most."""
    return tuple(sorted({*(2**power for power in range(max_requests.bit_length())), max_requests}))


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


def draft_widths(block_size: int, halves: int = 1) -> tuple[int, ...]:
    """Block sizes that a drafter of ``block_size`` positions drafts under the budget auto, ascending.

    Its own, and its half, ``halves`` times over; none below 4, which would draft less than 3 tokens.
    """
    widths = [block_size]
    while len(widths) <= halves and widths[0] // 2 >= _LEAST_WIDTH:
        widths.insert(0, widths[0] // 2)
    return tuple(widths)
