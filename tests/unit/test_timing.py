"""Round times at start: which graphs are replayed, and what becomes of the times. The clock is a stand-in."""

import logging
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.plugins import load_plugins

load_plugins()

from sglang_ddtree import overlay  # noqa: E402

overlay.lay()

from sglang.srt.speculative import ddtree_timing  # noqa: E402
from sglang.srt.speculative.ddtree_context import LEAST_TOKENS, MOST_REQUESTS, MOST_TOKENS  # noqa: E402


class Device:
    """Work takes time on the device, and launching it on the host; the device runs behind."""

    def __init__(self) -> None:
        self.host, self.device = 0.0, 0.0

    def launch(self, host: float, device: float) -> None:
        self.host += host
        self.device = max(self.device, self.host) + device

    def event(self, enable_timing: bool) -> SimpleNamespace:
        event = SimpleNamespace(at=0.0, elapsed_time=lambda later: 1000 * (later.at - event.at))

        def record() -> None:
            event.at = max(self.device, self.host)

        event.record = record
        return event

    def synchronize(self) -> None:
        self.host = max(self.host, self.device)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(ddtree_timing.torch.cuda, "Event", device.event)
    monkeypatch.setattr(ddtree_timing.torch.cuda, "synchronize", device.synchronize)
    monkeypatch.setattr(ddtree_timing.time, "perf_counter", lambda: device.host)
    return device


class Server:
    """What the graphs of a target and its drafter share: rows of slots, and a pool of so many."""

    def __init__(self, context: int = 600, slots: int = 2000, rows: int = 9) -> None:
        self.req_to_token_pool = SimpleNamespace(req_to_token=torch.full((rows, context + 4), 7, dtype=torch.int32))
        self.token_to_kv_pool = SimpleNamespace(size=slots)
        self.model_config = SimpleNamespace(context_len=context)

    @property
    def table(self) -> torch.Tensor:
        return self.req_to_token_pool.req_to_token


class Runner:
    """One of SGLang's graph runners: half a millisecond to launch, and on the device by its tokens and the distinct
    slots of the contexts."""

    seq_len_fill_value = 1

    def __init__(
        self,
        device: Device,
        sizes: list[int],
        width: int,
        fixed: float,
        each: float,
        server: Server | None = None,
        slope: float = 0.0,
    ) -> None:
        self.on, self.capture_bs, self.captured_req_width = device, sizes, width
        self.fixed, self.each, self.slope = fixed, each, slope
        self.model_runner = server or Server()
        most = max(sizes)
        self.buffers = SimpleNamespace(
            seq_lens=torch.ones(most, dtype=torch.int64),
            seq_lens_cpu=torch.ones(most, dtype=torch.int64),
            req_pool_indices=torch.zeros(most, dtype=torch.int64),
        )
        self.packed = False
        self.asked: set[tuple[int, int]] = set()
        self.seen: list[SimpleNamespace] = []
        self.backend = SimpleNamespace(replay=lambda key, batch: self.run(0.00001, key))

    def run(self, host: float, tokens: int) -> None:
        self.on.launch(host, self.fixed + self.each * tokens + self.slope * self.read)

    def capture_prepare(self, requests: int, num_tokens: int) -> tuple[SimpleNamespace, None, None]:
        self.asked.add((requests, num_tokens))
        inputs = {name: buffer[:requests] for name, buffer in vars(self.buffers).items()}
        spec_info = SimpleNamespace(draft_token_num=self.captured_req_width)
        if self.packed:
            spec_info.qo_indptr = torch.arange(self._ragged_capture_slots(num_tokens) + 1, dtype=torch.int32)
        return SimpleNamespace(tokens=num_tokens, spec_info=spec_info, **inputs), None, None

    def execute(self, batch: SimpleNamespace) -> None:
        """Loads the batch into the inputs, as SGLang's runner does, and gathers its slots."""
        rows = len(batch.seq_lens)
        for name, buffer in vars(self.buffers).items():
            buffer[:rows] = getattr(batch, name)
        contexts = zip(batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=True)
        slots = [self.model_runner.table[row, :length] for row, length in contexts]
        # A context of one token is what a capture has.
        self.read = len(torch.cat(slots).unique()) - rows if max(map(len, slots)) > 1 else 0
        self.seen.append(batch)
        self._replay_graph_key = batch.tokens
        self.run(0.0005, batch.tokens)

    def _ragged_capture_slots(self, total: int) -> int:
        return min(total, max(self.capture_bs))


def target_of(device: Device, totals: list[int], *arguments: object, **others: object) -> Runner:
    target = Runner(device, *arguments, **others)
    target.capture_num_tokens, target.packed = totals, True
    return target


def test_the_parts_add_up_and_the_host_is_a_bound(device: Device) -> None:
    drafter = Runner(device, [1, 2, 4], 16, 0.002, 1e-6)
    narrow = Runner(device, [1, 2, 4], 8, 0.001, 1e-6)
    drafters = {8: narrow, 16: drafter}
    target = target_of(device, [1, 2, 4, 16, 32], [1, 2, 4], 8, 0.004, 1e-5)
    replayed = set()

    def commit(requests: int, total: int) -> None:
        replayed.add((requests, total))
        device.launch(0.0001, 0.0003)

    commits = SimpleNamespace(largest=4, replay=commit)
    made = ddtree_timing.measure(
        drafters=drafters, target=target, commits=commits, max_budget=7, identity={"model": "m"}
    ).to_json()
    # The drafter's graphs by requests, the target's by tokens with as many requests as they hold.
    assert drafter.asked == {(1, 16), (2, 32), (4, 64)} and narrow.asked == {(1, 8), (2, 16), (4, 32)}
    assert target.asked == {(1, 1), (2, 2), (4, 4), (4, 16), (4, 32)}
    assert replayed == {(1, total) for total in target.capture_num_tokens}
    cells = {(r, t): s for r, t, s in made["drafted"]["16"]}
    assert cells[2, 16] == pytest.approx(0.002 + 32e-6 + 0.004 + 16e-5 + 0.0003)
    cells = {(r, t): s for r, t, s in made["drafted"]["8"]}
    assert cells[2, 16] == pytest.approx(0.001 + 16e-6 + 0.004 + 16e-5 + 0.0003)
    assert dict(made["plain"])[4] == pytest.approx(0.004 + 4e-5 + 0.0003)

    # A device that needs next to nothing: then a round lasts as long as the host.
    for runner in (drafter, narrow, target):
        runner.fixed = runner.each = 0.0
    made = ddtree_timing.measure(drafters=drafters, target=target, commits=commits, max_budget=7, identity={}).to_json()
    share = ddtree_timing.HOST_SHARE
    # What is left on the device are the commit's 0.3 ms.
    assert all(s == pytest.approx(share * 0.0011) for width in ("8", "16") for _, _, s in made["drafted"][width])
    assert all(s == pytest.approx(share * 0.0006) for _, s in made["plain"])


def test_a_width_is_timed_by_the_graphs_that_it_has(device: Device) -> None:
    """Numbers of requests that only one of the widths was captured for: the other takes its next larger graph."""
    drafters = {8: Runner(device, [2, 4], 8, 0.001, 1e-6), 16: Runner(device, [1, 2, 3], 16, 0.002, 1e-6)}
    target = target_of(device, [1, 2, 4, 8], [1, 2, 4], 8, 0.004, 1e-5)
    commits = SimpleNamespace(largest=4, replay=lambda requests, total: device.launch(0.0001, 0.0003))
    made = ddtree_timing.measure(drafters=drafters, target=target, commits=commits, max_budget=7, identity={})
    assert drafters[8].asked == {(2, 16), (4, 32)} and drafters[16].asked == {(1, 16), (2, 32), (3, 48)}
    # No more requests than all of them hold.
    assert {r for r, _, _ in made.to_json()["drafted"]["8"]} == {1, 2, 3}


def test_uniform_rounds_are_timed_by_the_graphs_of_every_width(device: Device) -> None:
    server = Server(context=40_000, slots=50_000, rows=20)
    drafter = Runner(device, [1, 4, 8], 8, 0.002, 1e-6, server, slope=3e-9)
    targets = {nodes: Runner(device, [1, 4, 8], nodes, 0.004, 1e-5, server, slope=5e-8) for nodes in (1, 4, 16)}
    made = ddtree_timing.measure_uniform(drafters={8: drafter}, targets=targets, identity={"model": "m"}).to_json()
    cells = {(r, t): s for r, t, s in made["drafted"]["8"]}
    # Two requests take the graphs of four.
    assert set(cells) == {(r, r * nodes) for r in (1, 2, 4, 8) for nodes in (4, 16)}
    assert cells[2, 32] == pytest.approx(0.002 + 32e-6 + 0.004 + 64e-5)
    assert dict(made["plain"])[8] == pytest.approx(0.004 + 8e-5)
    assert {total for _, total in targets[16].asked} <= {16, 64, 128, 6 * 16}
    # A plain round reads the target's contexts alone.
    assert {int(width): slope for width, slope in made["context"].items()} == pytest.approx({0: 5e-8, 8: 5e-8 + 3e-9})


# --- What longer contexts cost.


def test_what_a_context_token_adds_is_measured_with_slots_of_its_own(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    server = Server(context=40_000, slots=50_000, rows=20)
    drafter = Runner(device, [1, 8, 16], 16, 0.002, 1e-6, server, slope=3e-9)
    target = target_of(device, [1, 8, 16, 96, 128, 256], [1, 8, 16], 64, 0.004, 1e-5, server, slope=5e-8)
    before = server.table.clone()
    commits = SimpleNamespace(largest=16, replay=lambda requests, total: device.launch(0.0001, 0.0003))
    made = ddtree_timing.measure(drafters={16: drafter}, target=target, commits=commits, max_budget=63, identity={})
    # A plain round reads the target's alone. 50000 slots hold 6 requests of 8192 tokens.
    assert made.context == pytest.approx({0: 5e-8, 16: 5e-8 + 3e-9}) and made.context_base == 1
    longest = [max(run.seen, key=lambda batch: int(batch.seq_lens_cpu.sum())) for run in (target, drafter)]
    assert [batch.seq_lens.tolist() for batch in longest] == [[MOST_TOKENS] * 6] * 2
    assert {batch.seq_lens_sum for batch in longest} == {6 * MOST_TOKENS}
    # Rounds of a plain and of a usual size; every request has its share of the tokens.
    assert {(6, 8), (6, 96)} <= target.asked and (6, 6 * 16) in drafter.asked
    shares = [b.spec_info.qo_indptr.tolist() for b in target.seen if b.tokens == 96 and len(b.seq_lens) == 6]
    assert shares and all(share == [16 * b for b in range(7)] for share in shares)
    # All is as it was: later batches are as short as ever.
    assert torch.equal(server.table, before)
    for run in (drafter, target):
        assert run.buffers.seq_lens.tolist() == run.buffers.seq_lens_cpu.tolist() == [1] * 16
        assert not run.buffers.req_pool_indices.any()
    assert "a context token adds 0.0500 us plain, 0.0530 us with draft width 16" in caplog.text


def test_a_forward_that_is_no_slower_with_context_has_no_negative_slope(device: Device) -> None:
    server = Server(context=9000, slots=9000)
    drafter = Runner(device, [1], 16, 0.002, 0.0, server, slope=-1e-8)
    target = target_of(device, [1, 16], [1], 16, 0.004, 0.0, server, slope=2e-8)
    assert ddtree_timing.context_slopes({16: drafter}, target, 1) == pytest.approx({0: 2e-8, 16: 2e-8})


@pytest.mark.parametrize(
    "server, requests, tokens",
    [
        # As many requests as the graphs, the rows or the pool have room for, and tokens as the rows and the pool.
        (Server(context=20_000, slots=1_000_000, rows=99), MOST_REQUESTS, MOST_TOKENS),
        (Server(context=20_000, slots=1_000_000, rows=4), 3, MOST_TOKENS),
        (Server(context=20_000, slots=3 * MOST_TOKENS - 1), 2, MOST_TOKENS),
        (Server(context=20_000, slots=5000), 1, 5000),
        (Server(context=4000, slots=1_000_000), MOST_REQUESTS, 4000 - 16 - 8),
        (Server(context=LEAST_TOKENS + 16 + 8, slots=LEAST_TOKENS), 1, LEAST_TOKENS),
    ],
)
def test_contexts_are_as_long_as_fits(device: Device, server: Server, requests: int, tokens: int) -> None:
    drafter = Runner(device, [1, 16], 16, 0.002, 0.0, server, slope=1e-8)
    target = target_of(device, [1, 16, 128], [1, 16], 8, 0.004, 0.0, server, slope=2e-8)
    assert ddtree_timing.context_slopes({16: drafter}, target, 16) == pytest.approx({0: 2e-8, 16: 3e-8})
    for run in (drafter, target):
        assert {len(batch.seq_lens) for batch in run.seen} == {requests}
        assert {int(batch.seq_lens[0]) for batch in run.seen} == {1, tokens}


@pytest.mark.parametrize(
    "server",
    [
        Server(context=LEAST_TOKENS + 16 + 8 - 1, slots=100_000),
        Server(context=20_000, slots=LEAST_TOKENS - 1),
        Server(context=20_000, slots=100_000, rows=1),
    ],
)
def test_where_no_long_context_fits_none_is_measured(
    device: Device, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    drafter = Runner(device, [1], 16, 0.002, 0.0, server)
    target = target_of(device, [1, 16], [1], 8, 0.004, 0.0, server)
    assert ddtree_timing.context_slopes({16: drafter}, target, 1) == {}
    assert not drafter.seen and not target.seen
    assert "what longer contexts cost is not measured" in caplog.text


@pytest.mark.parametrize(
    "error, fatal", [(RuntimeError("no such graph"), False), (torch.OutOfMemoryError("no memory left"), True)]
)
def test_slots_are_given_back_whatever_happens(
    device: Device, error: Exception, fatal: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(context=9000, slots=9000)
    drafter = Runner(device, [1], 16, 0.002, 0.0, server)
    target = target_of(device, [1, 16], [1], 16, 0.004, 0.0, server)
    before, lent = server.table.clone(), []

    def replay(key: int, batch: SimpleNamespace) -> None:
        lent.append(not torch.equal(server.table, before))
        raise error

    monkeypatch.setattr(target.backend, "replay", replay)
    if fatal:
        with pytest.raises(type(error), match=str(error)):
            ddtree_timing.context_slopes({16: drafter}, target, 1)
    else:
        # The server starts all the same, and says why it does not know.
        assert ddtree_timing.context_slopes({16: drafter}, target, 1) == {}
        assert "cannot be measured" in caplog.text and str(error) in caplog.text
    assert lent == [True] and torch.equal(server.table, before)
    assert target.buffers.seq_lens.tolist() == [1] and target.buffers.req_pool_indices.tolist() == [0]


def test_a_server_that_is_other_than_expected_starts_without(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    server = Server(context=9000, slots=9000)
    del server.token_to_kv_pool
    runners = Runner(device, [1], 16, 0.002, 0.0, server), target_of(device, [1], [1], 16, 0.004, 0.0, server)
    assert ddtree_timing.context_slopes({16: runners[0]}, runners[1], 1) == {}
    assert "cannot be measured" in caplog.text and "token_to_kv_pool" in caplog.text
