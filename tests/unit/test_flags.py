"""The five flags: on the command line, in a config file and as keywords; and what they resolve to."""

import copy
import dataclasses
import pickle
from types import SimpleNamespace

import pytest
from sglang.srt.plugins import load_plugins

load_plugins()

from sglang.srt.model_executor.cuda_graph_config import Backend  # noqa: E402
from sglang.srt.server_args import ServerArgs, prepare_server_args  # noqa: E402
from sglang_ddtree import algorithm, flags, requirements  # noqa: E402
from sglang_ddtree.flags import DDTreeConfig, FlagError, config_of  # noqa: E402

BUDGET, CAP = "--speculative-ddtree-budget", "--speculative-ddtree-topk-cap"
SHADOW, UNSAFE = "--speculative-ddtree-shadow-linear", "--speculative-ddtree-allow-hybrid-unsafe"
MOST = "--speculative-ddtree-max-budget"
BLOCK = 8

on_a_cpu = pytest.mark.skipif(requirements.has_gpu(), reason="what a machine without a GPU resolves to")


@pytest.fixture
def parse(models):
    def parse(*argv, algorithm="DDTREE"):
        chosen = ["--speculative-algorithm", algorithm] if algorithm else []
        if algorithm:
            chosen += ["--speculative-draft-model-path", str(models / "drafter")]
        return prepare_server_args(["--model-path", str(models / "target"), *chosen, *argv])

    return parse


@pytest.fixture
def build(models):
    """As `sglang.Engine` does with its keywords."""

    def build(**keywords):
        fields = dict(
            model_path=str(models / "target"),
            speculative_algorithm="DDTREE",
            speculative_draft_model_path=str(models / "drafter"),
        )
        return ServerArgs(**(fields | keywords))

    return build


def values(server_args):
    config = config_of(server_args)
    return config.budget, config.topk_cap, config.shadow_linear, config.allow_hybrid_unsafe


# --- Three ways in ----------------------------------------------------------------------------------


def test_help_shows_the_flags(capsys):
    with pytest.raises(SystemExit) as end:
        prepare_server_args(["--help"])
    assert end.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for flag in (f"{BUDGET} B", f"{MOST} M", f"{CAP} K", SHADOW, UNSAFE):
        assert flag in text
    assert "1 to 256, or auto" in text and "Default auto, and 15 where" in text
    assert "1 to 63, default 63, and 15 on a target" in text and "Default 8." in text


def test_defaults(parse, build):
    assert values(parse()) == values(build()) == (15, 8, False, False)


def test_command_line(parse):
    assert values(parse(BUDGET, "7", CAP, "3", UNSAFE)) == (7, 3, False, True)
    assert values(parse(f"{BUDGET}=256", SHADOW)) == (256, 8, True, False)
    assert values(parse(BUDGET, "1", CAP, "1")) == (1, 1, False, False)


def test_keywords(build):
    given = dict(speculative_ddtree_budget=31, speculative_ddtree_topk_cap=4)
    assert values(build(**given)) == (31, 4, False, False)
    given = dict(speculative_ddtree_shadow_linear=True, speculative_ddtree_allow_hybrid_unsafe=True)
    assert values(build(**given)) == (15, 8, True, True)
    given = dict(speculative_ddtree_shadow_linear=False, speculative_ddtree_budget=None)
    assert values(build(**given)) == (15, 8, False, False)


CONFIG_FILES = {
    "speculative-ddtree-budget: 7": (7, 8, False, False),
    "speculative-ddtree-budget: 7\nspeculative-ddtree-topk-cap: 2": (7, 2, False, False),
    "speculative-ddtree-shadow-linear: true": (15, 8, True, False),
    "speculative-ddtree-allow-hybrid-unsafe: true": (15, 8, False, True),
    "speculative-ddtree-shadow-linear: false": (15, 8, False, False),
    "speculative-ddtree-allow-hybrid-unsafe: false": (15, 8, False, False),
}


@pytest.mark.parametrize("content, expected", CONFIG_FILES.items())
def test_config_file(content, expected, parse, tmp_path):
    path = tmp_path / "server.yaml"
    path.write_text(content + "\n")
    assert values(parse("--config", str(path))) == expected


def test_the_command_line_wins_over_the_config_file(parse, tmp_path):
    path = tmp_path / "server.yaml"
    path.write_text("speculative-ddtree-budget: 7\nspeculative-ddtree-topk-cap: 2\n")
    assert values(parse("--config", str(path), BUDGET, "9")) == (9, 2, False, False)


def test_a_config_file_can_choose_the_algorithm(models, tmp_path):
    path = tmp_path / "server.yaml"
    lines = {
        "model-path": models / "target",
        "speculative-algorithm": "ddtree",
        "speculative-draft-model-path": models / "drafter",
        "speculative-ddtree-budget": 5,
    }
    path.write_text("".join(f"{key}: {value}\n" for key, value in lines.items()))
    assert values(prepare_server_args(["--config", str(path)])) == (5, 8, False, False)


@pytest.mark.parametrize("spelling", ["ddtree", "DDTree", "DDTREE"])
def test_the_algorithms_name_in_any_case(spelling, parse, build):
    for server_args in (parse(algorithm=spelling), build(speculative_algorithm=spelling)):
        assert server_args.speculative_algorithm == "DDTREE"
        assert values(server_args) == (15, 8, False, False)


def test_one_call_leaves_nothing_for_the_next(parse, build):
    parse(BUDGET, "3", SHADOW)
    assert values(build()) == (15, 8, False, False)
    with pytest.raises(FlagError):
        parse(BUDGET, "3", CAP, "9999")
    assert values(build()) == (15, 8, False, False)


# --- A budget that follows the load ------------------------------------------------------------------


def auto_values(server_args):
    config = config_of(server_args)
    return config.auto, config.budget, config.topk


def test_auto_in_all_three_ways(parse, build, tmp_path):
    path = tmp_path / "server.yaml"
    path.write_text("speculative-ddtree-budget: auto\nspeculative-ddtree-max-budget: 31\n")
    assert auto_values(parse(BUDGET, "auto")) == auto_values(build(speculative_ddtree_budget="auto")) == (True, 63, 8)
    assert auto_values(parse("--config", str(path))) == (True, 31, 8)
    assert auto_values(parse(f"{BUDGET}=auto", MOST, "3")) == (True, 3, 3)
    given = dict(speculative_ddtree_budget="auto", speculative_ddtree_max_budget=7)
    assert auto_values(build(**given)) == (True, 7, 7)
    assert auto_values(parse(BUDGET, "63")) == (False, 63, 8)
    # Whether the largest budget is a wish: on a target with recurrent layers its default is another.
    assert [config_of(parse(BUDGET, "auto", *more)).most_given for more in ((), (MOST, "63"))] == [False, True]


def test_sizes_hold_for_the_widest_tree(parse):
    server_args = parse(BUDGET, "auto", MOST, "40")
    config = config_of(server_args)
    assert (config.verify_width, config.max_depth, config.slots_per_round) == (41, BLOCK - 1, 41)
    assert server_args.speculative_num_draft_tokens == 41
    assert dataclasses.replace(config, auto=False, auto_by_default=False) == config_of(parse(BUDGET, "40"))


def test_a_bound_belongs_to_auto(parse, build):
    with pytest.raises(FlagError) as error:
        build(speculative_ddtree_budget=15, speculative_ddtree_max_budget=31)
    assert str(error.value) == f"{MOST} 31 needs {BUDGET} auto, got 15. Give {BUDGET} auto, or drop the flag."


def test_auto_and_a_chain_are_refused(parse):
    with pytest.raises(FlagError) as error:
        parse(BUDGET, "auto", SHADOW)
    assert str(error.value) == (
        f"DDTREE does not support {BUDGET} auto here: with {SHADOW} every request's chain has one size. Drop one of "
        f"the two, or give a number, e.g. {BUDGET} 15."
    )


def test_auto_is_the_default_and_gives_way_where_it_cannot_be_served(parse):
    default = flags.config_from({})
    assert (default.auto, default.budget, default.auto_by_default, default.most_given) == (True, 63, True, False)
    # A CPU has no round times.
    assert auto_values(parse()) == (False, 15, 8)
    assert auto_values(parse(BUDGET, "auto")) == (True, 63, 8) and not config_of(parse(BUDGET, "auto")).auto_by_default
    assert auto_values(parse(MOST, "20")) == (True, 20, 8) and not config_of(parse(MOST, "20")).auto_by_default
    assert auto_values(parse(BUDGET, "9")) == (False, 9, 8)
    chain = config_of(parse(SHADOW))
    assert chain == DDTreeConfig(shadow_linear=True, block_size=BLOCK)
    with pytest.raises(FlagError, match="every request's chain has one size"):
        parse(SHADOW, MOST, "20")


# --- What they resolve to ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "budget, cap, expected", [(15, 8, 8), (3, 8, 3), (8, 8, 8), (1, 300, 1), (64, 300, 64), (256, 64, 64)]
)
def test_candidates_are_the_smaller_of_cap_and_budget(budget, cap, expected, build):
    config = config_of(build(speculative_ddtree_budget=budget, speculative_ddtree_topk_cap=cap))
    assert config.topk == expected
    assert config.topk_cap == cap


@pytest.mark.parametrize("budget, cap", [(65, 65), (256, 300)])
def test_more_candidates_than_the_kernels_hold(budget, cap, build):
    with pytest.raises(FlagError, match=f"topk-cap must be at most 64 .* got {cap} with budget {budget}. Use "):
        build(speculative_ddtree_budget=budget, speculative_ddtree_topk_cap=cap)


@pytest.mark.parametrize(
    "budget, block, width, depth, slots",
    [(15, 8, 16, 7, 16), (3, 8, 4, 3, 8), (7, 8, 8, 7, 8), (1, 16, 2, 1, 16), (256, 2, 257, 1, 257)],
)
def test_sizes_of_a_tree(budget, block, width, depth, slots):
    config = DDTreeConfig(budget=budget, block_size=block)
    assert (config.verify_width, config.max_depth, config.slots_per_round) == (width, depth, slots)


@pytest.mark.parametrize("budget", [1, 15, 100])
def test_a_shadow_chain_has_the_drafters_size_whatever_the_budget(budget):
    config = DDTreeConfig(budget=budget, block_size=8, shadow_linear=True)
    sizes = (config.topk, config.tree_budget, config.verify_width, config.max_depth, config.slots_per_round)
    # The tree beside it keeps the candidates that it would have.
    assert sizes == (min(8, budget), 7, 8, 7, 8)


def test_no_size_before_the_block_size_is_known():
    with pytest.raises(AssertionError, match="block size has not been inferred"):
        DDTreeConfig().max_depth  # noqa: B018


def test_block_size_is_the_drafters_or_the_flags(parse):
    assert config_of(parse()).block_size == BLOCK
    assert config_of(parse("--speculative-dflash-block-size", "5")).block_size == 5
    assert config_of(parse("--speculative-dflash-block-size", "16")).block_size == 16


@on_a_cpu
@pytest.mark.parametrize("budget", [1, 15, 64])
def test_resolved_fields(budget, parse):
    server_args = parse(BUDGET, str(budget))
    assert server_args.speculative_algorithm == "DDTREE"
    assert server_args.speculative_num_draft_tokens == budget + 1
    assert server_args.speculative_num_steps == 1
    # Only a branching of at least two selects the backends' tree paths.
    assert server_args.speculative_eagle_topk >= 2
    assert server_args.disable_overlap_schedule is True
    assert server_args.cuda_graph_config.decode.backend == Backend.DISABLED
    assert server_args.device == "cpu"
    assert server_args.attention_backend == "torch_native"
    assert server_args.get_attention_backends() == ("torch_native", "torch_native")
    assert server_args.page_size == 1
    assert server_args.max_running_requests == 48


def test_resolved_fields_of_a_shadow_chain(parse):
    server_args = parse(SHADOW, BUDGET, "30")
    assert server_args.speculative_num_draft_tokens == BLOCK
    assert server_args.speculative_eagle_topk == 1


def test_given_fields_are_kept(parse):
    server_args = parse("--max-running-requests", "3", "--page-size", "1")
    assert server_args.max_running_requests == 3
    assert parse("--enable-mixed-chunk").enable_mixed_chunk is False


@pytest.mark.parametrize("device, overlap", [("cuda", True), ("cpu", False)])
def test_overlap(device, overlap):
    """Kept on a GPU, with every backend; a CPU's events and streams are no real ones."""
    server_args = SimpleNamespace(disable_overlap_schedule=False, device=device)
    algorithm._resolve_overlap(server_args)
    assert server_args.disable_overlap_schedule is not overlap


@pytest.mark.parametrize("travel", [copy.deepcopy, lambda a: pickle.loads(pickle.dumps(a))], ids=["copy", "pickle"])
def test_the_config_travels_with_the_arguments(travel, parse):
    server_args = parse(BUDGET, "6", CAP, "4", UNSAFE)
    arrived = travel(server_args)
    assert arrived is not server_args
    expected = DDTreeConfig(budget=6, topk_cap=4, allow_hybrid_unsafe=True, block_size=BLOCK)
    assert config_of(arrived) == config_of(server_args) == expected
    assert arrived.speculative_num_draft_tokens == 7


def test_the_config_cannot_be_changed_underway():
    with pytest.raises(dataclasses.FrozenInstanceError):
        DDTreeConfig().budget = 3


def test_arguments_built_without_the_hooks_are_reported():
    with pytest.raises(RuntimeError, match=r"load_plugins\(\)"):
        config_of(SimpleNamespace(speculative_algorithm="DDTREE"))


# --- Refusals ---------------------------------------------------------------------------------------

BAD_BUDGETS = ["0", "-1", "abc", "1.5", "257", "", "Auto"]
BUDGET_RANGE = "must be auto, or an integer of at least 1 and at most 256, got"


@pytest.mark.parametrize("text", BAD_BUDGETS)
def test_bad_budget_on_the_command_line(text, parse, capsys):
    with pytest.raises(SystemExit) as end:
        parse(BUDGET, text)
    assert end.value.code == 2
    message = capsys.readouterr().err
    shown = text if text in ("0", "-1", "257") else repr(text)
    assert f"{BUDGET} {BUDGET_RANGE} {shown}." in message


@pytest.mark.parametrize("text", ["0", "-3", "x", "2.0"])
def test_bad_cap_on_the_command_line(text, parse, capsys):
    with pytest.raises(SystemExit) as end:
        parse(CAP, text)
    assert end.value.code == 2
    shown = text if text in ("0", "-3") else repr(text)
    assert f"{CAP} must be an integer of at least 1, got {shown}." in capsys.readouterr().err


@pytest.mark.parametrize("value", [0, -1, 257, "abc", 1.5, 7.0, True, False, [3]], ids=repr)
def test_bad_budget_as_a_keyword(value, build):
    with pytest.raises(FlagError) as error:
        build(speculative_ddtree_budget=value)
    assert str(error.value) == f"{BUDGET} {BUDGET_RANGE} {value!r}."


@pytest.mark.parametrize("value", [0, 64, "auto", 1.5, True], ids=repr)
def test_bad_bound_of_auto(value, build):
    with pytest.raises(FlagError) as error:
        build(speculative_ddtree_budget="auto", speculative_ddtree_max_budget=value)
    assert str(error.value) == f"{MOST} must be an integer of at least 1 and at most 63, got {value!r}."


@pytest.mark.parametrize("value", [0, -1, "x", True], ids=repr)
def test_bad_cap_as_a_keyword(value, build):
    with pytest.raises(FlagError) as error:
        build(speculative_ddtree_topk_cap=value)
    assert str(error.value) == f"{CAP} must be an integer of at least 1, got {value!r}."


@pytest.mark.parametrize("value", [1, 0, "true", "False"], ids=repr)
@pytest.mark.parametrize("flag", [SHADOW, UNSAFE])
def test_bad_switch_as_a_keyword(flag, value, build):
    with pytest.raises(FlagError) as error:
        build(**{flag[2:].replace("-", "_"): value})
    assert str(error.value) == f"{flag} must be True or False, got {value!r}."


def test_bad_value_in_a_config_file(parse, tmp_path, capsys):
    path = tmp_path / "server.yaml"
    path.write_text("speculative-ddtree-budget: 300\n")
    with pytest.raises(SystemExit):
        parse("--config", str(path))
    assert f"{BUDGET} {BUDGET_RANGE} 300." in capsys.readouterr().err


def test_a_misspelt_keyword_is_an_error(build):
    with pytest.raises(TypeError, match="speculative_ddtree_budgets"):
        build(speculative_ddtree_budgets=3)


@pytest.mark.parametrize(
    "argv",
    [(BUDGET, "7"), (BUDGET, "auto"), (MOST, "7"), (CAP, "2"), (SHADOW,), (UNSAFE,), (SHADOW, BUDGET, "15")],
    ids=str,
)
@pytest.mark.parametrize("algorithm", [None, "NGRAM"])
def test_a_flag_without_the_algorithm_is_an_error(algorithm, argv, models):
    chosen = ["--speculative-algorithm", algorithm] if algorithm else []
    with pytest.raises(FlagError) as error:
        prepare_server_args(["--model-path", str(models / "target"), *chosen, *argv])
    message = str(error.value)
    for flag in argv:
        if flag.startswith("--"):
            assert flag in message
    assert f"needs --speculative-algorithm DDTREE, got {algorithm!r}." in message
    assert message.endswith("Add the algorithm or drop the flag.")


def test_without_the_algorithm_nothing_is_carried(parse):
    server_args = parse(algorithm=None)
    assert server_args.speculative_algorithm is None
    assert not hasattr(server_args, "_ddtree_config")
    assert server_args.speculative_num_draft_tokens is None
