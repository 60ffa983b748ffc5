"""A source file as a module: for tests and benchmarks that run without SGLang, or without the overlay laid."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]


def load(name: str, path: str) -> ModuleType:
    """The module at ``path`` (relative to the repository) as ``name``, loaded once per process."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / path)
        assert spec is not None and spec.loader is not None, f"no module at {path}"
        module = importlib.util.module_from_spec(spec)
        # Registered before it runs: dataclasses look their module up in sys.modules.
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]
