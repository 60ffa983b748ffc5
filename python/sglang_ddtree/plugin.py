"""Entry point of the group ``sglang.srt.plugins``: how DDTREE gets into SGLang.

SGLang calls :func:`load` in the launcher before the arguments are parsed, and again in every scheduler
process. It swallows a plugin's exception and later says "unknown algorithm", so :func:`load` does little
that can fail and registers DDTREE with a validator that raises the real reason.
"""


def load() -> None:
    """Register the flags and the algorithm; patch nothing else.

    Without ``--speculative-algorithm DDTREE`` SGLang keeps its own behaviour, with one exception: where
    there is no accelerator, stand-ins for ``sgl_kernel`` let a server start on the CPU.
    """
    from sglang_ddtree import cpu

    # Before anything of SGLang is imported: its modules look for sgl_kernel at import time.
    if cpu.needs_stand_ins():
        cpu.install()

    from sglang_ddtree import algorithm, flags

    flags.install()
    algorithm.register()
