"""Where the table of round times is kept, and for what server: `ddtree_cost` has the table itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang.srt.speculative import ddtree_cost
from sglang.srt.speculative.ddtree_cost import CostTable

if TYPE_CHECKING:
    from sglang_ddtree.flags import DDTreeConfig

CACHE_VARIABLE = "SGLANG_DDTREE_CACHE_DIR"


def identity_of(
    server_args: Any, config: DDTreeConfig, buckets: Sequence[int], widths: Sequence[int], most_requests: int
) -> dict[str, str | int]:
    """What a table of round times holds for, see `ddtree_cost.identity`.

    Args:
        server_args: SGLang's, resolved.
        config: of the flags.
        buckets: totals of verify tokens.
        widths: block sizes that are drafted.
        most_requests: that there are times for.
    """
    import torch
    from sglang_ddtree import __version__

    def text(name: str) -> str:
        return str(getattr(server_args, name, None))

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return ddtree_cost.identity(
        text("model_path"),
        gpu,
        int(server_args.tp_size),
        revision=text("revision"),
        drafter=text("speculative_draft_model_path"),
        drafter_revision=text("speculative_draft_model_revision"),
        dtype=text("dtype"),
        quantization=text("quantization"),
        kv_cache_dtype=text("kv_cache_dtype"),
        attention_backend=text("attention_backend"),
        draft_attention_backend=text("speculative_draft_attention_backend"),
        linear_attn_backend=text("linear_attn_backend"),
        mamba_ssm_dtype=text("mamba_ssm_dtype"),
        disable_cuda_graph=text("disable_cuda_graph"),
        block_size=config.require_block_size(),
        draft_widths=",".join(str(width) for width in widths),
        budget=config.budget,
        topk=config.topk,
        buckets=",".join(str(tokens) for tokens in buckets),
        most_requests=most_requests,
        sglang=_version("sglang"),
        torch=torch.__version__,
        triton=_version("triton"),
        sglang_ddtree=__version__,
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def cache_folder() -> Path:
    """Where tables are kept: SGLANG_DDTREE_CACHE_DIR, else ``sglang-ddtree`` in the user's cache."""
    given = os.environ.get(CACHE_VARIABLE)
    if given:
        return Path(given).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "sglang-ddtree"


def cost_table(
    identity: Mapping[str, Any],
    measure: Callable[[], CostTable],
    agree: Callable[[bool], bool] = bool,
    folder: str | Path | None = None,
) -> CostTable | None:
    """The table of this server: from disk, else measured now and written there.

    Args:
        identity: of `identity_of`.
        measure: measures; under tensor parallelism on all ranks together.
        agree: under tensor parallelism, what takes whether this rank found a table and returns whether the first rank
            did: all ranks measure, or none.
        folder: None: `cache_folder`.

    Returns:
        None only on a rank that found no table where the first rank, which decides, found one.
    """
    path = ddtree_cost.cache_path(cache_folder() if folder is None else folder, identity)
    return ddtree_cost.load_or_measure(path, identity, measure, agree)
