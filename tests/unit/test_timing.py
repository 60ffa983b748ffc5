"""Round times at start: which graphs are replayed, and what becomes of the times. The clock is a stand-in."""

from types import SimpleNamespace

import pytest
from sglang.srt.plugins import load_plugins

load_plugins()

from sglang_ddtree import overlay  # noqa: E402

overlay.lay()

from sglang.srt.speculative import ddtree_timing  # noqa: E402


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


class Runner:
    """One of SGLang's graph runners: half a millisecond to launch, and on the device by its tokens."""

    def __init__(self, device: Device, sizes: list[int], width: int, fixed: float, each: float) -> None:
        self.on, self.capture_bs, self.captured_req_width = device, sizes, width
        self.fixed, self.each = fixed, each
        self.asked: set[tuple[int, int]] = set()
        self.backend = SimpleNamespace(replay=lambda key, batch: self.run(0.00001, key))

    def run(self, host: float, tokens: int) -> None:
        self.on.launch(host, self.fixed + self.each * tokens)

    def capture_prepare(self, requests: int, num_tokens: int) -> tuple[SimpleNamespace, None, None]:
        self.asked.add((requests, num_tokens))
        return SimpleNamespace(tokens=num_tokens), None, None

    def execute(self, batch: SimpleNamespace) -> None:
        self._replay_graph_key = batch.tokens
        self.run(0.0005, batch.tokens)

    def _ragged_capture_slots(self, total: int) -> int:
        return min(total, max(self.capture_bs))


def test_the_parts_add_up_and_the_host_is_a_bound(device: Device) -> None:
    drafter = Runner(device, [1, 2, 4], 16, 0.002, 1e-6)
    narrow = Runner(device, [1, 2, 4], 8, 0.001, 1e-6)
    drafters = {8: narrow, 16: drafter}
    target = Runner(device, [1, 2, 4], 8, 0.004, 1e-5)
    target.capture_num_tokens = [1, 2, 4, 16, 32]
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
    target = Runner(device, [1, 2, 4], 8, 0.004, 1e-5)
    target.capture_num_tokens = [1, 2, 4, 8]
    commits = SimpleNamespace(largest=4, replay=lambda requests, total: device.launch(0.0001, 0.0003))
    made = ddtree_timing.measure(drafters=drafters, target=target, commits=commits, max_budget=7, identity={})
    assert drafters[8].asked == {(2, 16), (4, 32)} and drafters[16].asked == {(1, 16), (2, 32), (3, 48)}
    # No more requests than all of them hold.
    assert {r for r, _, _ in made.to_json()["drafted"]["8"]} == {1, 2, 3}
