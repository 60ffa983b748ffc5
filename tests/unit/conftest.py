"""Fixtures of the unit tests."""

from pathlib import Path

import pytest
import tiny_models

BLOCK_SIZE = 8


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny ``target`` and its ``drafter`` of block size 8."""
    folder = tmp_path_factory.mktemp("models")
    tiny_models.make_target(folder / "target")
    tiny_models.make_drafter(folder / "drafter", block_size=BLOCK_SIZE)
    return folder
