"""A round's numbers on the scheduler's side: added up on each request, and as Prometheus metrics."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from sglang_ddtree.flags import DDTreeConfig, config_of
from sglang_ddtree.round_stats import layout_of, row_of

_HISTOGRAMS = {
    "committed_tokens": ("ddtree_committed_tokens", "Tokens committed by a round of one request."),
    "tree_depth": ("ddtree_tree_depth", "Depth of the deepest node of a round's tree."),
    "tree_committed_tokens": (
        "ddtree_shadow_committed_tokens",
        "Tokens that the tree would at least have committed in a round of one request (shadow-linear).",
    ),
}
_COUNTERS = {
    "tree_nodes": ("ddtree_tree_nodes_total", "Nodes of the trees, the roots not counted."),
    "side_branch": ("ddtree_side_branch_rounds_total", "Rounds whose accepted path left the chain."),
    "mismatch": ("ddtree_mismatch_rounds_total", "Rounds whose chain the target left (shadow-linear)."),
    "rescue": (
        "ddtree_rescued_rounds_total",
        "Rounds in which the tree held the target's token where the target left the chain (shadow-linear).",
    ),
    "pruned": (
        "ddtree_pruned_rounds_total",
        "Rounds in which the tree held less of the chain than the target accepted (shadow-linear).",
    ),
}


# Of `AutoReport`, the names of its fields.
_AUTO_COUNTERS = {
    "plain": ("ddtree_auto_plain_rounds_total", "Rounds of a batch that drafted nothing (budget auto)."),
    "narrow": (
        "ddtree_auto_narrow_rounds_total",
        "Rounds of a batch that drafted a part of the drafter's block (budget auto).",
    ),
    "probe": (
        "ddtree_auto_probe_rounds_total",
        "Rounds of a batch that drafted to learn what drafts are worth, not because it paid (budget auto).",
    ),
    "forecast": (
        "ddtree_auto_forecast_tokens_total",
        "Committed tokens that the budget's policy expected when it decided (budget auto).",
    ),
    "expected": (
        "ddtree_auto_expected_tokens_total",
        "Committed tokens by the drafter's own probabilities of the verified nodes (budget auto).",
    ),
    "committed": (
        "ddtree_auto_committed_tokens_total",
        "Committed tokens, to compare with the expected ones (budget auto).",
    ),
}


def _maker(collector: Any) -> Callable[..., Any]:
    """What makes a metric of this process's, with SGLang's own labels."""
    labels = collector.labels

    def make(kind: Any, name: str, text: str, **more: Any) -> Any:
        return kind(f"sglang:{name}", text, labelnames=list(labels), **more).labels(**labels)

    return make


def _kinds(collector: Any) -> tuple[Any, Any]:
    """The classes of counters and histograms."""
    # After SGLang has set PROMETHEUS_MULTIPROC_DIR, which prometheus_client reads when it is imported.
    import prometheus_client

    return (
        collector._counter_cls or prometheus_client.Counter,
        collector._histogram_cls or prometheus_client.Histogram,
    )


class RoundMetrics:
    """The Prometheus metrics of one scheduler process, with SGLang's own labels.

    Counting begins with the first round; a metric that has counted nothing yet is shown as zero.
    """

    def __init__(self, collector: Any, config: DDTreeConfig):
        (counter, histogram), make = _kinds(collector), _maker(collector)
        self._columns = layout_of(config).columns
        self._rounds = make(counter, "ddtree_rounds_total", "Rounds, counted once for every request in them.")
        self._counters = {name: make(counter, *_COUNTERS[name]) for name in self._columns if name in _COUNTERS}
        buckets = list(range(1, config.max_depth + 2))
        self._histograms = {
            name: make(histogram, *_HISTOGRAMS[name], buckets=buckets) for name in self._columns if name in _HISTOGRAMS
        }

    def observe(self, rows: Sequence[Sequence[int]]) -> None:
        """Count the rows of one batch."""
        self._rounds.inc(len(rows))
        for place, name in enumerate(self._columns):
            if name in self._counters:
                self._counters[name].inc(sum(row[place] for row in rows))
            else:
                for row in rows:
                    self._histograms[name].observe(row[place])


class AutoMetrics:
    """The Prometheus metrics of the budget auto, of one scheduler process; a round here is one of a whole batch."""

    def __init__(self, collector: Any, buckets: tuple[int, ...]):
        (counter, histogram), make = _kinds(collector), _maker(collector)
        self._counters = {name: make(counter, *texts) for name, texts in _AUTO_COUNTERS.items()}
        self._tokens = make(
            histogram,
            "ddtree_auto_verify_tokens",
            "Verify tokens chosen for a round, of all its requests together (budget auto).",
            buckets=list(buckets),
        )

    def observe(self, report: Any) -> None:
        """Count a round; ``report`` is an ``AutoReport``."""
        self._tokens.observe(report.tokens)
        for name, counter in self._counters.items():
            counter.inc(getattr(report, name))


# A process has one scheduler; a metric's name can be registered once.
_metrics_of = functools.cache(RoundMetrics)
_auto_metrics_of = functools.cache(AutoMetrics)


def count_rounds(processor: Any, result: Any, batch: Any) -> None:
    """Count a round whose result has reached the host, for the requests that it still belongs to.

    Under overlap scheduling a request may have ended, or have been retracted, while its next round was under way:
    SGLang drops the tokens of that round, and it is not counted. The budget auto learns from it all the same.

    Args:
        processor: SGLang's batch result processor.
        result: of the round; only a ``DDTreeBatchResult`` carries numbers.
        batch: the batch of that round. The totals of its requests grow.
    """
    stats = getattr(result, "round_stats", None)
    if stats is None:
        return
    config = config_of(processor.server_args)
    layout = layout_of(config)
    shown = processor.metrics_reporter.current_scheduler_metrics_enabled
    counted, rows = [], stats.tolist()
    for req, numbers in zip(batch.reqs, rows, strict=True):
        if req.finished() or req.is_retracted:
            continue
        row = row_of(config, numbers)
        # A list of integers per request that SGLang carries to the process that answers, for caps that DDTREE does not
        # have; `complete_meta_info` takes it out again.
        layout.add(req.spec_cap_lens_histogram, row)
        counted.append(row)
    if counted and shown:
        _metrics_of(processor.metrics_collector, config).observe(counted)
    auto_round = getattr(result, "auto_round", None)
    if auto_round is not None:
        report = _end_auto_round(auto_round, result, batch.reqs, rows)
        if shown:
            _auto_metrics_of(processor.metrics_collector, auto_round.owner.buckets).observe(report)


def _end_auto_round(auto_round: Any, result: Any, reqs: Sequence[Any], rows: Sequence[Sequence[int]]) -> Any:
    """Give a round's numbers back to the `AutoBudget` that decided it; its ``AutoReport``."""
    from sglang.srt.speculative.ddtree_auto import request_classes

    told = (result.histogram, result.expected, result.worth)
    histogram, expected, worth = (None if x is None else x.tolist() for x in told)
    accepted = [numbers[0] for numbers in rows]
    classes = [] if expected is None else request_classes(reqs)
    return auto_round.owner.end_round(auto_round, histogram, expected, accepted, classes, worth)
