"""Shared by all tests: the helper modules beside this file are importable."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE / "unit", HERE / "server"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


@pytest.fixture
def refused(request: pytest.FixtureRequest) -> str:
    """The message that the README's support table quotes for this test, from its ``feature`` marker."""
    (message,) = [mark.kwargs["refused"] for mark in request.node.iter_markers("feature")]
    return message


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
