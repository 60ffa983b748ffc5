"""Import a source file by its path, so that these tests run where SGLang is not installed."""

import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from by_path import load  # noqa: E402

__all__ = ["ROOT", "load", "load_ddtree_utils"]


def load_ddtree_utils() -> ModuleType:
    return load("ddtree_utils", "python/sglang/srt/speculative/ddtree_utils.py")
