"""What the plugin never does with input; docs/security.md says more."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "python").rglob("*.py"))
# Modules that make objects or processes out of data, or open connections; and functions that run text.
MODULES = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "yaml", "subprocess", "socket", "runpy"}
MODULES |= {"fastapi", "starlette", "uvicorn", "http", "urllib", "requests", "zmq"}
CALLS = {"eval", "exec", "compile", "__import__", "system", "popen"}


def suspects(source: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names} & MODULES
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found |= {(node.module or "").split(".")[0]} & MODULES
        elif isinstance(node, ast.Call):
            called = node.func
            name = called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")
            owner = getattr(getattr(called, "value", None), "id", "")
            found |= {name} & CALLS if owner != "re" else set()
            if (owner, name) == ("torch", "load"):
                found.add("torch.load")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "python")))
def test_nothing_is_unpickled_or_evaluated(path: Path) -> None:
    # The overlay runs the package's own files in the namespace of SGLang's modules.
    allowed = {"exec", "compile"} if path.name == "overlay.py" else set()
    assert suspects(path.read_text()) == allowed


@pytest.mark.parametrize(
    "source, found",
    [
        ("import pickle", "pickle"),
        ("from pickle import loads", "pickle"),
        ("eval('1')", "eval"),
        ("import os\nos.system('ls')", "system"),
        ("import torch\ntorch.load('x')", "torch.load"),
        ("from fastapi import FastAPI", "fastapi"),
    ],
)
def test_the_check_would_notice(source: str, found: str) -> None:
    assert suspects(source) == {found}
