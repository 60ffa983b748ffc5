"""The flags ``--speculative-ddtree-*``: how they reach SGLang's parser, and their values.

SGLang has no plugin flags: its parser is derived from the dataclass ``ServerArgs``. Three hooks add ours:
after ``add_cli_args`` (so that ``--help`` and ``--config`` files know them), around ``from_cli_args`` (which
forwards its own fields only) and around ``__init__`` (for ``sglang.Engine(speculative_ddtree_budget=...)``).
The values travel as ``server_args._ddtree_config``, which copies and pickles along with the arguments.
"""

import argparse
import contextvars
import dataclasses
import inspect
import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

ALGORITHM = "DDTREE"
# The widest tree the ancestor bit words and the device kernels are built for.
MAX_BUDGET = 256
# The most candidates per position that the device kernels hold.
MAX_TOPK = 64
# The budget that follows the load, and the widest tree whose part a packed round can verify.
AUTO = "auto"
MAX_AUTO_BUDGET = 63
# The same on a target with recurrent layers, where nothing was given: every node's states take memory.
HYBRID_AUTO_BUDGET = 15
# The number served where none is given and auto cannot be served, or has no round times to go by.
FIXED_BUDGET = 15
_PREFIX = "speculative_ddtree_"


@dataclasses.dataclass(frozen=True)
class DDTreeConfig:
    """What the five flags say; the drafter's block size joins once the checkpoint has been read."""

    budget: int = FIXED_BUDGET
    """Nodes drafted per round and request, the root not counted; with ``auto`` the most of them, from which every size
    below follows."""
    topk_cap: int = 8
    """Candidates kept per block position, at most ``budget`` of them are used."""
    shadow_linear: bool = False
    """Serve with a chain (DFLASH's linear verify) and count what the tree would have gained."""
    allow_hybrid_unsafe: bool = False
    """Let a hybrid target run tree verify although its state forking is not proven exact."""
    block_size: int | None = None
    """The drafter's block size D, None until it has been inferred."""
    auto: bool = False
    """How many nodes are verified follows the load, for all running requests together."""
    auto_by_default: bool = False
    """Auto because nothing was asked for: where it cannot be served, `FIXED_BUDGET` is."""
    uniform: bool = False
    """With auto: all requests of a round verify as many nodes, as the target's recurrent layers need it."""
    most_given: bool = True
    """With auto: ``budget`` was asked for, and is not the default."""

    @property
    def packed(self) -> bool:
        """Whether the requests of a round share its verify tokens."""
        return self.auto and not self.uniform

    @property
    def topk(self) -> int:
        """Candidates per position K = min(cap, budget)."""
        return min(self.topk_cap, self.budget)

    @property
    def tree_budget(self) -> int:
        """Nodes the served round drafts: the budget, or the whole chain in shadow-linear mode."""
        return self.require_block_size() - 1 if self.shadow_linear else self.budget

    @property
    def verify_width(self) -> int:
        """Tokens per request in the target's verify forward, N = budget + 1 (D for a chain)."""
        return self.tree_budget + 1

    @property
    def max_depth(self) -> int:
        """The deepest node a round can hold, and so the most drafts it can commit."""
        return min(self.require_block_size() - 1, self.tree_budget)

    @property
    def slots_per_round(self) -> int:
        """KV slots a round may write per request: the draft's block or the verify width."""
        return max(self.require_block_size(), self.verify_width)

    def require_block_size(self) -> int:
        assert self.block_size is not None, "the drafter's block size has not been inferred yet"
        return self.block_size


class FlagError(ValueError):
    """A flag's value cannot be served; the message names flag, value and remedy."""


def flag_name(field: str) -> str:
    return "--" + (_PREFIX + field).replace("_", "-")


def _integer(field: str, low: int, high: int | None = None, word: str | None = None) -> Callable[[Any], int | str]:
    """A parser for a flag that takes an integer within [low, high], or one word."""

    def parse(value: Any) -> int | str:
        if word is not None and value == word:
            return word
        expected = f"an integer of at least {low}" + (f" and at most {high}" if high else "")
        expected = expected if word is None else f"{word}, or {expected}"
        try:
            number = int(str(value))
        except ValueError:
            raise FlagError(f"{flag_name(field)} must be {expected}, got {value!r}.") from None
        if number < low or (high is not None and number > high):
            raise FlagError(f"{flag_name(field)} must be {expected}, got {number}.")
        return number

    return parse


def _boolean(field: str) -> Callable[[Any], bool]:
    def parse(value: Any) -> bool:
        if not isinstance(value, bool):
            raise FlagError(f"{flag_name(field)} must be True or False, got {value!r}.")
        return value

    return parse


_PARSERS: dict[str, Callable[[Any], Any]] = {
    "budget": _integer("budget", 1, MAX_BUDGET, AUTO),
    "max_budget": _integer("max_budget", 1, MAX_AUTO_BUDGET),
    "topk_cap": _integer("topk_cap", 1),
    "shadow_linear": _boolean("shadow_linear"),
    "allow_hybrid_unsafe": _boolean("allow_hybrid_unsafe"),
}
DESTS = tuple(_PREFIX + field for field in _PARSERS)

# Flags parsed by from_cli_args on their way to __init__ of the same call.
_from_cli: contextvars.ContextVar[dict[str, Any] | None] = contextvars.ContextVar("ddtree_flags", default=None)


def _argparse_type(field: str) -> Callable[[str], int | str]:
    def parse(text: str) -> int | str:
        try:
            return _PARSERS[field](text)
        except FlagError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def add_cli_args(parser: argparse.ArgumentParser) -> None:
    """Add the five flags; each defaults to None, so that a flag that was given can be told from one that was not."""
    default = DDTreeConfig()
    group = parser.add_argument_group("DDTree speculative decoding (--speculative-algorithm DDTREE)")
    group.add_argument(
        flag_name("budget"),
        type=_argparse_type("budget"),
        metavar="B",
        help="DDTREE: nodes drafted per round and request, the root not counted; the target verifies B + 1 "
        f"tokens a round. 1 to {MAX_BUDGET}, or {AUTO}: decided for all running requests together, as the load goes. "
        f"Default {AUTO}, and {FIXED_BUDGET} where that cannot be served or has no round times to go by: on a CPU, "
        "without decode CUDA graphs, on attention backends other than triton, on targets with recurrent layers, and "
        "with a few flags more.",
    )
    group.add_argument(
        flag_name("max_budget"),
        type=_argparse_type("max_budget"),
        metavar="M",
        help=f"DDTREE: with {flag_name('budget')} {AUTO}, the most nodes drafted per round and request. 1 to "
        f"{MAX_AUTO_BUDGET}, default {MAX_AUTO_BUDGET}, and {HYBRID_AUTO_BUDGET} on a target with recurrent layers. "
        f"Giving it asks for {AUTO}.",
    )
    group.add_argument(
        flag_name("topk_cap"),
        type=_argparse_type("topk_cap"),
        metavar="K",
        help=f"DDTREE: candidate tokens kept per drafted position, at most the budget. Default {default.topk_cap}.",
    )
    group.add_argument(
        flag_name("shadow_linear"),
        action="store_true",
        default=None,
        help="DDTREE: verify DFLASH's chain instead of the tree, and report what the tree would have gained. Safe on "
        "every target.",
    )
    group.add_argument(
        flag_name("allow_hybrid_unsafe"),
        action="store_true",
        default=None,
        help="DDTREE: run tree verify on a hybrid (recurrent + attention) target although its state forking "
        "is not proven exact; the output may differ from the target's own.",
    )


def config_from(values: dict[str, Any]) -> DDTreeConfig:
    """The validated config of flag values by dest name; None means "not given".

    Raises:
        FlagError: a value is out of range or of the wrong type, or two do not go together.
    """
    fields = {}
    for field, parse in _PARSERS.items():
        value = values.get(_PREFIX + field)
        if value is not None:
            fields[field] = parse(value)
    config = DDTreeConfig(**_budget_fields(fields.pop("budget", None), fields.pop("max_budget", None)), **fields)
    if config.shadow_linear:
        config = settle_auto(
            config, f"with {flag_name('shadow_linear')} every request's chain has one size", "Drop one of the two"
        )
    if min(config.topk_cap, config.budget) > MAX_TOPK:
        raise FlagError(
            f"{flag_name('topk_cap')} must be at most {MAX_TOPK} with a budget above {MAX_TOPK}, got {config.topk_cap} "
            f"with budget {config.budget}. Use {flag_name('topk_cap')} {MAX_TOPK} or less."
        )
    return config


def _budget_fields(budget: int | str | None, most: int | None) -> dict[str, Any]:
    """The fields of `DDTreeConfig` that the two flags for the budget decide; None means "not given"."""
    if budget is None or budget == AUTO:
        # Its bound is as much a wish for auto as the word itself.
        given = most is not None
        return {
            "budget": most or MAX_AUTO_BUDGET,
            "auto": True,
            "auto_by_default": budget is None and not given,
            "most_given": given,
        }
    if most is not None:
        raise FlagError(
            f"{flag_name('max_budget')} {most} needs {flag_name('budget')} {AUTO}, got {budget}. Give "
            f"{flag_name('budget')} {AUTO}, or drop the flag."
        )
    return {"budget": budget}


def settle_auto(config: DDTreeConfig, reason: str, remedy: str) -> DDTreeConfig:
    """The config where auto cannot be served: with a number, if auto was only the default.

    Args:
        config: one without auto is returned as it is.
        reason: why trees of one batch cannot differ in size here.
        remedy: what to do beside giving a number.

    Raises:
        FlagError: auto was asked for.
    """
    if not config.auto:
        return config
    if not config.auto_by_default:
        raise FlagError(
            f"DDTREE does not support {flag_name('budget')} {AUTO} here: {reason}. {remedy}, or give a number, e.g. "
            f"{flag_name('budget')} {FIXED_BUDGET}."
        )
    logger.info("DDTREE: %s %d instead of %s: %s.", flag_name("budget"), FIXED_BUDGET, AUTO, reason)
    return dataclasses.replace(config, budget=FIXED_BUDGET, auto=False, auto_by_default=False, most_given=True)


def config_of(server_args: Any) -> DDTreeConfig:
    """The config that travels with ``server_args``.

    Raises:
        RuntimeError: the arguments were built where the plugin's hooks do not reach.
    """
    config = getattr(server_args, "_ddtree_config", None)
    if config is None:
        raise RuntimeError(
            "DDTREE: these ServerArgs carry no DDTree configuration. Build them after "
            "sglang.srt.plugins.load_plugins(), as launch_server and sglang.Engine do."
        )
    return config


def _init_hook(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    given = dict(_from_cli.get() or {})
    for dest in DESTS:
        if dest in kwargs:
            given[dest] = kwargs.pop(dest)
    given = {dest: value for dest, value in given.items() if value is not None}
    bound = inspect.signature(original).bind_partial(self, *args, **kwargs).arguments
    if str(bound.get("speculative_algorithm") or "").upper() == ALGORITHM:
        from sglang_ddtree import compat, requirements

        config = config_from(given)
        fields = {**dict(bound), "speculative_algorithm": ALGORITHM}
        fields.pop("self", None)
        compat.check()
        requirements.check_fields(fields)
        requirements.check_drafter_readable(fields)
        resolved = requirements.defaults_for(fields)
        kwargs.update(resolved)
        self._ddtree_config = requirements.settle_auto_by_fields(config, {**fields, **resolved})
    elif given:
        names = ", ".join("--" + dest.replace("_", "-") for dest in given)
        raise FlagError(
            f"{names} needs --speculative-algorithm {ALGORITHM}, got "
            f"{bound.get('speculative_algorithm')!r}. Add the algorithm or drop the flag."
        )
    original(self, *args, **kwargs)
    if getattr(self, "_ddtree_config", None) is not None:
        from sglang_ddtree import activation

        activation.activate_answers()


def _from_cli_args_hook(original: Callable[..., Any], cls: type, args: argparse.Namespace) -> Any:
    token = _from_cli.set({dest: getattr(args, dest, None) for dest in DESTS})
    try:
        return original(cls, args)
    finally:
        _from_cli.reset(token)


def _add_cli_args_hook(result: Any, parser: argparse.ArgumentParser) -> None:
    add_cli_args(parser)


def install() -> None:
    """Register the three hooks; SGLang applies them when every plugin has been loaded."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    args = "sglang.srt.server_args.ServerArgs"
    HookRegistry.register(f"{args}.add_cli_args", _add_cli_args_hook, HookType.AFTER)
    HookRegistry.register(f"{args}.from_cli_args", _from_cli_args_hook, HookType.AROUND)
    HookRegistry.register(f"{args}.__init__", _init_hook, HookType.AROUND)
