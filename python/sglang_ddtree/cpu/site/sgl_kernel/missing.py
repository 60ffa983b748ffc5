"""Functions that SGLang imports on the CPU but does not call on the paths that are supported there."""

from collections.abc import Callable
from typing import NoReturn


def has_no_stand_in(name: str) -> Callable[..., NoReturn]:
    """A function of any arguments that raises NotImplementedError and says which kernel was wanted."""

    def stub(*args, **kwargs) -> NoReturn:
        raise NotImplementedError(f"this machine has no GPU: {name} has no CPU stand-in")

    stub.__name__ = stub.__qualname__ = name
    return stub
