"""Targets with recurrent layers: their kinds, and where a tree's recurrent states are exact.

A recurrent layer reads its predecessor's state, which in a tree is the parent's. SGLang forks states by parent index
in some of its kernels; docs/hybrid.md says which, and how that was shown.
"""

import dataclasses
from typing import Any

from sglang_ddtree.flags import DDTreeConfig, flag_name


@dataclasses.dataclass(frozen=True)
class Recurrent:
    """One kind of recurrent layer.

    Attributes:
        name: in words, for messages.
        unproven: why a tree's states may be wrong whatever the settings; None where SGLang forks them exactly.
    """

    name: str
    unproven: str | None = None


GDN, MAMBA2 = Recurrent("gated delta rule (GDN)"), Recurrent("Mamba2")
DYNAMIC_GDN = Recurrent(
    "gated delta rule (GDN) with a dynamic convolution", "the convolution runs from node to node, not from the parent"
)
SEQUENTIAL_MAMBA2 = Recurrent("Mamba2", "this model's convolution runs by a kernel that keeps no states of nodes")
SHORT_CONVOLUTION = Recurrent("short convolution", "SGLang hands it no tree links")
KDA = Recurrent("Kimi delta attention (KDA)", "its states in a tree have not been proven exact")
LIGHTNING = Recurrent("Lightning attention", "SGLang verifies a tree there as a chain")
UNKNOWN = Recurrent("recurrent", "nothing is known of its states in a tree")


def recurrent_layers(target: Any) -> Recurrent | None:
    """The kind of recurrent layer of a target, None for attention only; ``target`` is SGLang's ``ModelConfig``.

    The order is that in which SGLang chooses the layers' backend.
    """
    from sglang.srt import configs
    from sglang.srt.configs import hybrid_arch

    found = hybrid_arch.hybrid_gdn_config(target)
    if found is not None:
        # Qwen3.5's text config is one of these too; Jet-Nemotron's is not.
        return GDN if isinstance(found, configs.Qwen3NextConfig) else DYNAMIC_GDN
    try:
        found = hybrid_arch.mamba2_config(target)
    except ValueError:
        # Inkling's config asks for a context that exists only in a running server.
        return SHORT_CONVOLUTION
    if found is not None:
        if isinstance(found, configs.NemotronHConfig | configs.GraniteMoeHybridConfig):
            return MAMBA2
        return SEQUENTIAL_MAMBA2 if isinstance(found, configs.FalconH1Config) else SHORT_CONVOLUTION
    kinds = (
        (KDA, hybrid_arch.kimi_linear_config),
        (LIGHTNING, hybrid_arch.hybrid_lightning_config),
        (UNKNOWN, hybrid_arch.mambaish_config),
    )
    return next((kind for kind, find in kinds if find(target) is not None), None)


def unproven(server_args: Any, target: Any, config: DDTreeConfig) -> str | None:
    """Why a tree's recurrent states may be wrong under these settings; None where they are exact, or there are none.

    Args:
        server_args: resolved, up to speculation.
        target: SGLang's ``ModelConfig``.
        config: with a known block size.
    """
    kind = recurrent_layers(target)
    if kind is None:
        return None
    if kind.unproven is not None:
        return kind.unproven

    def get(name: str, default: Any = None) -> Any:
        return getattr(server_args, name, default)

    if kind is MAMBA2 and get("mamba_backend", "triton") not in (None, "triton"):
        return f"--mamba-backend {get('mamba_backend')} knows no parents, triton does"
    if get("enable_mamba_cache_stochastic_rounding"):
        return "--enable-mamba-cache-stochastic-rounding rounds states that are handed on, not those of nodes"
    if get("enable_int8_mamba_checkpoint"):
        return "--enable-int8-mamba-checkpoint restores a prefix's state rounded"
    return _convolution_dtype(target) or _tracking(server_args, config)


def _convolution_dtype(target: Any) -> str | None:
    """A window of a node holds inputs of this round beside kept ones, which must not have been rounded."""
    from sglang.srt.configs.mamba_utils import mamba2_state_dtype

    dtype, kept = getattr(target, "dtype", None), mamba2_state_dtype(None).conv
    if dtype is None or dtype == kept:
        return None
    short = str(dtype).removeprefix("torch.")
    return (
        f"the short convolution's states are kept in {str(kept).removeprefix('torch.')} and computed in {short} "
        f"(set SGLANG_MAMBA_CONV_DTYPE={short})"
    )


def _tracking(server_args: Any, config: DDTreeConfig) -> str | None:
    """States of prefixes are written at multiples of an interval, into a slot that the host learns of a round later.

    Of two rounds in a row only one may reach a multiple, or the second overwrites what the prefix cache owns by then.
    """
    strategy = getattr(server_args, "mamba_radix_cache_strategy", "no_buffer")
    if getattr(server_args, "disable_radix_cache", False) or strategy == "no_buffer":
        return None
    interval, least = int(getattr(server_args, "mamba_track_interval", 256)), 2 * (config.max_depth + 1)
    if interval >= least:
        return None
    return f"--mamba-track-interval {interval} is shorter than two rounds (give {least} or more)"


def refusal(model_path: str, kind: Recurrent, reason: str) -> str:
    """What a start is refused with where a tree's recurrent states are not exact."""
    return (
        f"DDTREE: the target {model_path} has recurrent layers of type {kind.name}, whose state a tree can corrupt: "
        f"{reason}. {flag_name('shadow_linear')} serves DFLASH's chain, which is always safe; "
        f"{flag_name('allow_hybrid_unsafe')} runs the tree anyway, and its output may differ from the target's own."
    )
