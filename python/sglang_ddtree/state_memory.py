"""What the recurrent states of a hybrid target cost, and how many requests have room for them.

SGLang gives a share of the free memory to states and lets fewer requests run where that is too little. A tree makes it
little soon, since every node has a state of its own.
"""

import dataclasses
import logging
from typing import Any

from sglang_ddtree.flags import DDTreeConfig, FlagError, config_of, flag_name

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class StateMemory:
    """The states of a server, all recurrent layers together; of one rank.

    Attributes:
        state_bytes: one state.
        nodes: of a request in one verify, the root included.
        slots: states that a request may hold beside its nodes': its own, and those of prefixes.
        share_bytes: memory that states may take, or the share they would get by themselves.
    """

    state_bytes: int
    nodes: int
    slots: int
    share_bytes: int

    @property
    def tree_bytes(self) -> int:
        """The nodes of one request."""
        return self.state_bytes * self.nodes

    @property
    def request_bytes(self) -> int:
        return self.state_bytes * (self.nodes + self.slots)

    def fitting_requests(self) -> int:
        """Requests whose states fit into the share; SGLang keeps one slot and one request's nodes for padding."""
        return max(0, (self.share_bytes - self.state_bytes - self.tree_bytes) // self.request_bytes)

    def fitting_nodes(self, requests: int, kept: int = 0) -> int:
        """The most nodes with which ``requests`` fit into the share; below 2 there is no tree.

        Args:
            requests: that run at once.
            kept: states beside their nodes', if more than they need.
        """
        states = self.share_bytes // self.state_bytes - 1 - max(kept, requests * self.slots)
        return max(0, states // (requests + 1))


def _size(number: int) -> str:
    return f"{number / 1e9:.2f} GB" if number >= 1e8 else f"{number / 1e6:.2f} MB"


def describe(memory: StateMemory, requests: int) -> str:
    """What a request's states cost, and how many requests fit."""
    return (
        f"Recurrent states take {_size(memory.state_bytes)} each: {_size(memory.tree_bytes)} for the "
        f"{memory.nodes} nodes of a request and {_size(memory.request_bytes - memory.tree_bytes)} for up to "
        f"{memory.slots} more; {requests} requests fit."
    )


def too_little(
    memory: StateMemory, asked: int, fitting: int, cache_size: int | None, budget_flag: str = flag_name("budget")
) -> str:
    """The error for ``asked`` requests of which only ``fitting`` have room.

    Args:
        cache_size: what ``--max-mamba-cache-size`` was given as, None: memory is what lacks.
        budget_flag: what sets the most nodes.
    """
    if cache_size is not None and cache_size < asked * memory.slots:
        way_out = (
            f"--max-mamba-cache-size {cache_size} holds {memory.slots} states for each of {fitting}; "
            f"give {asked * memory.slots} or drop it"
        )
    else:
        budget = memory.fitting_nodes(asked, cache_size or 0) - 1
        fits = f"{budget_flag} {budget} would fit" if budget > 0 else "no budget would fit"
        way_out = (
            f"{fits}; or lower --max-running-requests, raise --mamba-full-memory-ratio or --mem-fraction-static, or "
            "halve the states with --mamba-ssm-dtype bfloat16"
        )
    return (
        f"DDTREE: --max-running-requests {asked} does not fit. {describe(memory, fitting)} "
        f"{way_out[0].upper()}{way_out[1:]}."
    )


def check(configurator: Any, free_gb: float, left_gb: float | None, cache_size: int | None) -> None:
    """Log what states cost; called when SGLang has sized its pool of them.

    Args:
        configurator: SGLang's ``KVCacheConfigurator`` of the target.
        free_gb: memory (GiB) for states and keys and values together.
        left_gb: what is left of it for keys and values; None: SGLang found no room for a single request.
        cache_size: ``--max-mamba-cache-size`` as given.
    Raises:
        FlagError: the requests asked for do not fit; it names a budget with which they would.
    """
    from sglang.srt.runtime_context import get_schedule

    server_args = configurator.server_args
    config: DDTreeConfig = config_of(server_args)
    schedule = get_schedule()
    ratio = float(schedule.mamba_full_memory_ratio)
    memory = StateMemory(
        state_bytes=int(configurator.mambaish_config.mamba2_cache_params.mamba_cache_per_req),
        nodes=config.verify_width,
        slots=configurator._calculate_mamba_ratio(),
        share_bytes=max(0, int(free_gb * (1 << 30) * ratio / (1 + ratio))),
    )
    asked = int(schedule.max_running_requests)
    if left_gb is None or left_gb <= 0:
        fitting = min(asked, memory.fitting_requests())
    else:
        fitting = int(schedule.max_mamba_cache_size) // memory.slots
    # A chain's width is not the budget's to choose, and a number that nobody asked for may be lowered.
    fails = left_gb is None or left_gb <= 0 or (fitting < asked and server_args._ddtree_requests_given)
    if fails and not config.shadow_linear:
        budget_flag = flag_name("max_budget" if config.auto else "budget")
        raise FlagError(too_little(memory, asked, fitting, cache_size, budget_flag))
    if configurator.ps.tp_rank == 0:
        logger.info("DDTREE: %s", describe(memory, fitting))
