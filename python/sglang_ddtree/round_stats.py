"""What is counted of every round, per request: the numbers themselves, without torch and without SGLang.

The worker takes a few numbers per request and round from the device (`srt/speculative/ddtree_stats.py`), the scheduler
makes a row of them and adds the rows up on the request, and the process that answers HTTP turns the sums into
``meta_info["ddtree"]``. All know the server's configuration, so that only integers travel. `docs/metrics.md` explains
each number.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from sglang_ddtree.flags import DDTreeConfig

# A row of the mode that verifies the tree.
TREE_COLUMNS = ("committed_tokens", "tree_nodes", "tree_depth", "side_branch")
# A row of shadow-linear mode: the tree is only looked at.
SHADOW_COLUMNS = (
    "committed_tokens",
    "tree_nodes",
    "tree_depth",
    "mismatch",
    "rescue",
    "pruned",
    "tree_committed_tokens",
)


def row_of(config: DDTreeConfig, numbers: Sequence[int]) -> tuple[int, ...]:
    """A round's row from what the device says of it.

    Args:
        numbers: the drafts that were accepted; nodes of the tree, the root counted; its depth; and 1 if the accepted
            path left the chain, or in shadow-linear mode if the tree, as far as it goes, holds the token for which the
            target left the chain.

    Returns:
        ``TREE_COLUMNS`` or ``SHADOW_COLUMNS``.
    """
    accepted, nodes, depth, side = numbers
    if not config.shadow_linear:
        return accepted + 1, nodes - 1, depth, side
    # The tree holds the chain down to its own depth, and so the place where the target left it, or it does not.
    pruned = int(accepted > depth)
    rescue = side * (1 - pruned)
    mismatch = int(accepted < config.max_depth)
    return accepted + 1, nodes - 1, depth, mismatch, rescue, pruned, min(accepted, depth) + 1 + rescue


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where a request's totals lie in one flat list of integers, which is what SGLang carries.

    First the rounds, then the sum of every column, then a histogram of ``most + 1`` bins for each column that has one;
    bin n counts the rounds of value n.
    """

    columns: tuple[str, ...]
    histograms: tuple[str, ...]
    most: int
    """The most tokens that a round commits."""

    @property
    def length(self) -> int:
        return 1 + len(self.columns) + len(self.histograms) * (self.most + 1)

    def add(self, totals: list[int], row: Sequence[int]) -> None:
        """Add one round. Mutates ``totals``, which is empty before the first."""
        if not totals:
            totals.extend([0] * self.length)
        totals[0] += 1
        for place, value in enumerate(row, start=1):
            totals[place] += value
        start = 1 + len(self.columns)
        for name in self.histograms:
            totals[start + row[self.columns.index(name)]] += 1
            start += self.most + 1

    def read(self, totals: Sequence[int]) -> tuple[int, dict[str, int], dict[str, list[int]]]:
        """Rounds, the sum of each column, and each histogram."""
        assert len(totals) == self.length, f"totals must have {self.length} numbers, got {len(totals)}"
        sums = dict(zip(self.columns, totals[1:], strict=False))
        histograms, start = {}, 1 + len(self.columns)
        for name in self.histograms:
            histograms[name] = list(totals[start : start + self.most + 1])
            start += self.most + 1
        return totals[0], sums, histograms


def layout_of(config: DDTreeConfig) -> Layout:
    if config.shadow_linear:
        return Layout(SHADOW_COLUMNS, ("committed_tokens", "tree_committed_tokens"), config.max_depth + 1)
    return Layout(TREE_COLUMNS, ("committed_tokens",), config.max_depth + 1)


def summary(config: DDTreeConfig, totals: Sequence[int]) -> dict[str, Any]:
    """``meta_info["ddtree"]`` of a request with at least one round; see `docs/metrics.md`."""
    rounds, sums, histograms = layout_of(config).read(totals)
    committed = sums["committed_tokens"]
    report: dict[str, Any] = {
        "rounds": rounds,
        "committed_tokens": committed,
        "committed_tokens_per_round": committed / rounds,
        "committed_tokens_histogram": histograms["committed_tokens"],
        "tree_nodes_per_round": sums["tree_nodes"] / rounds,
        "tree_depth_per_round": sums["tree_depth"] / rounds,
    }
    if not config.shadow_linear:
        # An accepted path has one node per depth, so its last node's depth is the number of accepted drafts.
        report["accepted_depth_histogram"] = histograms["committed_tokens"][1:]
        report["side_branch_rounds"] = sums["side_branch"]
        report["side_branch_share"] = sums["side_branch"] / rounds
        return report
    report["mismatch_rounds"] = sums["mismatch"]
    report["rescued_rounds"] = sums["rescue"]
    report["rescue_share"] = sums["rescue"] / sums["mismatch"] if sums["mismatch"] else 0.0
    report["pruned_rounds"] = sums["pruned"]
    report["tree_committed_tokens"] = sums["tree_committed_tokens"]
    report["tree_committed_tokens_per_round"] = sums["tree_committed_tokens"] / rounds
    report["tree_committed_tokens_histogram"] = histograms["tree_committed_tokens"]
    return report


def complete_meta_info(config: DDTreeConfig, meta_info: dict[str, Any]) -> None:
    """Put the numbers into ``meta_info`` of a finished request, in the process that answers. Mutates it."""
    totals = meta_info.pop("spec_cap_lens_histogram", None)
    if totals:
        meta_info["ddtree"] = summary(config, totals)
    if "spec_accept_rate" in meta_info:
        # SGLang divides by all drafted nodes, of which a path can hold but one per depth.
        possible = meta_info["spec_verify_ct"] * config.max_depth
        meta_info["spec_accept_rate"] = meta_info["spec_num_correct_drafts"] / possible
