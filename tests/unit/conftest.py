"""Fixtures of the unit tests."""

from pathlib import Path

import pytest
import tiny_models

BLOCK_SIZE = 8
HERE = Path(__file__).resolve().parent


def interpreted(item: pytest.Item) -> bool:
    return HERE in item.path.parents and item.name.endswith("in_the_interpreter")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Last of all: what they wait for runs beside the others.
    items.sort(key=interpreted)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """With this folder's first test begins the process in which Triton interprets, see _kernels.py."""
    import _kernels

    if _kernels.interpreter is not None:
        return
    files = {other.path for other in item.session.items if interpreted(other)}
    if files:
        _kernels.interpreter = _kernels.Interpreter(files)


def pytest_sessionfinish() -> None:
    import _kernels

    if _kernels.interpreter is not None:
        _kernels.interpreter.stop()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny ``target`` and its ``drafter`` of block size 8."""
    folder = tmp_path_factory.mktemp("models")
    tiny_models.make_target(folder / "target")
    tiny_models.make_drafter(folder / "drafter", block_size=BLOCK_SIZE)
    return folder
