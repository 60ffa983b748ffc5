"""Lay this project's ``python/sglang`` tree over the installed SGLang, in memory only.

- A file that SGLang does not have becomes a new module: its folder joins the package's ``__path__``.
- A file that SGLang has too is run in that module's namespace, and so extends the module.

Nothing is ever written into SGLang's own folder.
"""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

_PACKAGE = "sglang"


def overlay_root() -> Path:
    """The folder that mirrors the package ``sglang``: inside a wheel, or beside us in a checkout."""
    here = Path(__file__).resolve().parent
    packed = here / "overlay"
    # In a wheel install the sibling folder named "sglang" is SGLang itself, so the packed copy goes first.
    root = packed if packed.is_dir() else here.parent / _PACKAGE
    if (root / "__init__.py").exists() or not (root / "srt").is_dir():
        raise FileNotFoundError(
            f"sglang_ddtree: no overlay folder at {root}; the installation is incomplete, "
            "reinstall the package sglang-ddtree"
        )
    return root


def _module_name(path: Path, root: Path) -> str:
    return ".".join((_PACKAGE, *path.relative_to(root).with_suffix("").parts))


def _extend_path(package: ModuleType, folder: Path) -> None:
    if str(folder) not in package.__path__:
        package.__path__.append(str(folder))


def _extend_module(name: str, path: Path) -> None:
    """Run ``path`` in the namespace of the module ``name``, once a process."""
    module = importlib.import_module(name)
    done: set[str] = module.__dict__.setdefault("__ddtree_overlay__", set())
    if str(path) in done:
        return
    exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
    done.add(str(path))


def lay() -> None:
    """Lay every file of the overlay over the installed package. Idempotent."""
    root = overlay_root()
    files = sorted(root.rglob("*.py"))
    own: dict[Path, bool] = {}
    for path in files:
        package = importlib.import_module(_module_name(path.parent, root))
        installed = [Path(p) / path.name for p in package.__path__ if Path(p) != path.parent]
        own[path] = not any(p.exists() for p in installed)
        if own[path]:
            _extend_path(package, path.parent)
    # After every new module can be imported, since an extension may import one.
    for path in files:
        if not own[path]:
            _extend_module(_module_name(path, root), path)


def is_laid() -> bool:
    """Whether :func:`lay` has run in this process."""
    package = sys.modules.get("sglang.srt.speculative")
    return package is not None and str(overlay_root() / "srt" / "speculative") in package.__path__
