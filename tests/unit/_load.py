"""Import a source file by its path, so that these tests run where SGLang is not installed."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def load(name: str, path: str) -> ModuleType:
    """The module at `path` (relative to the repository) as `name`, loaded once per process."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / path)
        assert spec is not None and spec.loader is not None, f"no module at {path}"
        module = importlib.util.module_from_spec(spec)
        # Registered before it runs: dataclasses look their module up in sys.modules.
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def load_ddtree_utils() -> ModuleType:
    return load("ddtree_utils", "python/sglang/srt/speculative/ddtree_utils.py")
