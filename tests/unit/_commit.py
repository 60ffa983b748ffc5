"""What a commit graph reads of a server: stand-ins on the CPU, in the interpreter, or on a GPU."""

from types import SimpleNamespace

import torch
from _kernels import DEVICE
from sglang.srt.speculative.ddtree_commit_graph import VerifyTail

FEATURES, HEADS = 6, (2, 16)


def make_pool(slots: int = 200) -> SimpleNamespace:
    def filled() -> torch.Tensor:
        return torch.randn((slots, *HEADS), device=DEVICE)

    pool = SimpleNamespace(k_buffer=[filled() for _ in range(2)], v_buffer=[filled() for _ in range(2)])
    buffers = pool.k_buffer + pool.v_buffer
    pool.data_ptrs = torch.tensor([x.data_ptr() for x in buffers], dtype=torch.uint64, device=DEVICE)
    pool.data_strides = torch.tensor([x[0].nbytes for x in buffers], device=DEVICE)
    return pool


def capture(run):
    """On a GPU a real graph, without SGLang's distributed state."""
    run()
    if DEVICE == "cpu":
        return run
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


class Server:
    """What the graphs read of a target's runner, and a drafter that remembers what it was fed.

    Args:
        sizes: captured batch sizes.
        totals: verify tokens of the target's graphs.
        places: of a path.
    """

    def __init__(self, sizes: list[int], totals: list[int], places: int) -> None:
        self.buffers = SimpleNamespace(
            seq_lens=torch.ones(max(sizes), dtype=torch.int64, device=DEVICE),
            out_cache_loc=torch.zeros(max(totals), dtype=torch.int64, device=DEVICE),
        )
        self.capture_bs, self.bs, self.places = sizes, 0, places
        self.pool = make_pool()
        self.tail = VerifyTail()
        self.capture_num_tokens, self.max_bs = totals, max(sizes)
        self.logits = {total: torch.zeros(total, 50, device=DEVICE) for total in totals}
        self.hidden = {total: torch.zeros(total, FEATURES, device=DEVICE) for total in totals}
        self.drafted = torch.zeros(200, FEATURES, device=DEVICE)
        self.fed = torch.zeros(max(sizes), places, FEATURES, device=DEVICE)
        for total in sorted(totals, reverse=True):
            self.forward(total)

    def forward(self, total: int) -> None:
        output = SimpleNamespace(next_token_logits=self.logits[total], hidden_states=self.hidden[total])
        self.tail(self, output, None, total)

    def feed(self, hidden: torch.Tensor, walk) -> None:
        bs = walk.rows.shape[0]
        valid = torch.arange(self.places, device=DEVICE) < walk.accept_lens[:, None]
        self.fed[:bs].copy_(torch.where(valid[..., None], hidden.view(bs, self.places, FEATURES), 0.0))

    def feed_rows(self, hidden: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        """The drafter's pool holds the hidden state and, in its first feature, the position."""
        self.drafted.index_copy_(0, slots, torch.cat([positions[:, None].to(hidden.dtype), hidden[:, 1:]], dim=1))

    def _ragged_capture_slots(self, total: int) -> int:
        return min(total, self.max_bs)

    def arguments(self) -> dict:
        """Of the graphs' constructors."""
        return dict(runner=self, tail=self.tail, pool=self.pool, capture=capture)
