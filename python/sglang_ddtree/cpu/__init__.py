"""Run SGLang's CPU engine from wheels that were built for a GPU.

SGLang's CPU code imports a dozen functions from ``sgl_kernel``. The wheel that pip installs was built for
CUDA: without a CUDA driver its import fails, and its ``*_cpu`` functions have no kernel behind them anyway.
The folder ``site`` beside this file holds a package of the same name in plain PyTorch. Once that folder
stands first on ``sys.path``, SGLang finds it there, and so does every process that it spawns: a spawned
process inherits the environment and ``sys.path``.
"""

import functools
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

__all__ = ["SITE", "install", "needs_stand_ins"]

SITE = Path(__file__).resolve().parent / "site"
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # A CUDA build of PyTorch brings an NCCL that loads anywhere, and with tensor parallelism SGLang then asks
    # for a CUDA device. A library that does not load makes it use gloo alone.
    "SGLANG_NCCL_SO_PATH": os.devnull,
}


def has_accelerator() -> bool:
    """True if PyTorch sees a device to use instead of the CPU: CUDA, ROCm, XPU, MPS, NPU or HPU."""
    import torch

    if torch.cuda.is_available():
        return True
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is not None and accelerator.is_available():
        return True
    devices = (torch.backends.mps, *(getattr(torch, name, None) for name in ("xpu", "npu", "hpu")))
    return any(device is not None and device.is_available() for device in devices)


@functools.cache
def needs_stand_ins() -> bool:
    """True if this machine has no accelerator and the real ``sgl_kernel`` cannot be imported.

    The import is tried at most once per process, and what a failed attempt leaves in ``sys.modules`` is
    removed. In a process where the stand-ins are already active the answer stays True.
    """
    if has_accelerator():
        return False
    loaded = sys.modules.get("sgl_kernel")
    if loaded is not None:
        return _is_stand_in(loaded)
    if importlib.util.find_spec("sgl_kernel") is None:
        return True
    try:
        real = importlib.import_module("sgl_kernel")
    # Besides ImportError, a missing driver or library can surface as OSError, RuntimeError or AttributeError.
    except Exception:
        _purge_real_package()
        return True
    return _is_stand_in(real)


def install() -> None:
    """Make this process and those it spawns use SGLang's CPU engine with the stand-ins; safe to repeat.

    Sets the variables in ``ENVIRONMENT`` that are not yet set, puts ``SITE`` first on ``sys.path``, removes a
    real (or half-imported) ``sgl_kernel`` from ``sys.modules``, and lets SGLang detect the device anew if it
    has already done so. Modules of SGLang that were imported before keep what they found out. That is
    harmless in the launcher, where a plugin runs late; a process that loads a model must start afterwards.
    """
    for variable, value in ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    site = str(SITE)
    sys.path[:] = [site, *(entry for entry in sys.path if entry != site)]
    _purge_real_package()
    importlib.invalidate_caches()
    _forget_detected_device()


def _is_stand_in(module: ModuleType) -> bool:
    return Path(getattr(module, "__file__", None) or "/").resolve().is_relative_to(SITE)


def _purge_real_package() -> None:
    """Drop every ``sgl_kernel`` module from ``sys.modules`` that is not ours.

    A package whose import fails leaves the submodules that it had already loaded behind, and those would
    answer for submodules of the stand-in.
    """
    for name, module in list(sys.modules.items()):
        if (name == "sgl_kernel" or name.startswith("sgl_kernel.")) and not _is_stand_in(module):
            del sys.modules[name]


def _forget_detected_device() -> None:
    """Clear SGLang's cached answers to "is this the CPU engine?" and "which device?"."""
    common = sys.modules.get("sglang.srt.utils.common")
    for name in ("is_cpu", "get_device"):
        clear = getattr(getattr(common, name, None), "cache_clear", None)
        if clear is not None:
            clear()
