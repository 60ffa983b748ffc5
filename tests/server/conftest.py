"""Fixtures: the pairs of tiny models and their servers, shared by the whole session."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from pairs import Pair, make_pair


@pytest.fixture(scope="session")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Pair]]:
    pairs: dict[str, Pair] = {}

    def get(kind: str) -> Pair:
        if kind not in pairs:
            pairs[kind] = make_pair(tmp_path_factory.mktemp(kind), kind)
        return pairs[kind]

    yield get
    for pair in pairs.values():
        pair.stop()


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
