"""Fixtures: the pairs of tiny models and their servers, shared by the whole session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pairs import Pair, assert_slots_are_back, make_pair, stop_all, stop_parents

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="session")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    pairs: dict[str, Pair] = {}

    def get(kind: str) -> Pair:
        if kind not in pairs:
            pairs[kind] = make_pair(tmp_path_factory.mktemp(kind), kind)
        return pairs[kind]

    return get


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """The servers end with this folder's last test, not with the session: others need the memory."""
    if nextitem is None or HERE not in nextitem.path.parents:
        stop_all()
        stop_parents()


@pytest.fixture(autouse=True)
def slots_come_back() -> Iterator[None]:
    """After every test all running servers have their KV slots back, whatever the test did to them."""
    yield
    assert_slots_are_back()


@pytest.fixture
def qwen3(pair_of: Callable[[str], Pair]) -> Iterator[Pair]:
    pair = pair_of("qwen3")
    yield pair
    pair.script()


@pytest.fixture
def llama(pair_of: Callable[[str], Pair]) -> Iterator[Pair]:
    pair = pair_of("llama")
    yield pair
    pair.script()
