"""Fixtures of the unit tests."""

from pathlib import Path

import pytest
import tiny_models

BLOCK_SIZE = 8


def pytest_collection_finish(session: pytest.Session) -> None:
    import _kernels

    _kernels.selected.update(item.path for item in session.items if item.name.endswith("in_the_interpreter"))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny ``target`` and its ``drafter`` of block size 8."""
    folder = tmp_path_factory.mktemp("models")
    tiny_models.make_target(folder / "target")
    tiny_models.make_drafter(folder / "drafter", block_size=BLOCK_SIZE)
    return folder
