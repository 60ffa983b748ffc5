"""How DDTREE gets into SGLang: nothing changes unless it is asked for, and an unknown SGLang is refused."""

import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from sglang.srt.plugins import load_plugins

load_plugins()

import sglang  # noqa: E402
from sglang.srt.server_args import prepare_server_args  # noqa: E402
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # noqa: E402
from sglang_ddtree import activation, compat, cpu, overlay  # noqa: E402
from sglang_ddtree.flags import DDTreeConfig, config_of  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
BLOCK = 8

# What activation may hook; written down here so that one more hook is noticed.
HOOKED_FUNCTIONS = [
    "sglang.srt.mem_cache.allocation_sizing.get_alloc_len_per_decode",
    "sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len",
    "sglang.srt.speculative.dflash_utils.validate_dflash_request",
    "sglang.srt.speculative.spec_info.create_dummy_verify_input",
    "sglang.srt.constrained.xgrammar_backend._allocate_token_bitmask",
]
HOOKED_METHODS = [
    "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._handle_max_mamba_cache",
    "sglang.srt.managers.schedule_batch.Req.extend_image_inputs",
    "sglang.srt.managers.schedule_batch.Req.update_finish_state",
    "sglang.srt.managers.scheduler.Scheduler.get_init_info",
    "sglang.srt.managers.scheduler.Scheduler.init_req_max_new_tokens",
    "sglang.srt.constrained.llguidance_backend.GuidanceGrammar.apply_vocab_mask",
    "sglang.srt.constrained.xgrammar_backend.XGrammarGrammar.apply_vocab_mask",
    "sglang.srt.managers.scheduler_components.batch_result_processor"
    ".SchedulerBatchResultProcessor._resolve_spec_v2_tokens",
    "sglang.srt.managers.scheduler_components.batch_result_processor"
    ".SchedulerBatchResultProcessor._apply_decode_logprobs",
]
HOOKED = [*HOOKED_FUNCTIONS, *HOOKED_METHODS]
# In the process that parses the arguments and answers HTTP.
ANSWERING = ["sglang.srt.managers.tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics"]


def plain(models):
    return ["--model-path", str(models / "target")]


def ddtree(models, *more):
    drafter = ["--speculative-draft-model-path", str(models / "drafter")]
    return [*plain(models), "--speculative-algorithm", "DDTREE", *drafter, *more]


def in_a_fresh_process(program, models):
    """What `program` puts into `report`; it has `plain` and `ddtree`, argument lists of a server."""
    head = f"""
import json, os, pkgutil, sys
plain, ddtree = json.loads(sys.argv[1]), json.loads(sys.argv[2])
report = {{}}
from sglang_ddtree import cpu
if cpu.needs_stand_ins():
    cpu.install()
{program}
print("REPORT" + json.dumps(report))
"""
    # What the plugin must arrange by itself is not inherited.
    inherited = {name: value for name, value in os.environ.items() if name not in cpu.ENVIRONMENT}
    done = subprocess.run(
        [sys.executable, "-c", head, json.dumps(plain(models)), json.dumps(ddtree(models))],
        env={**inherited, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("REPORT"))
    return json.loads(line.removeprefix("REPORT"))


# --- Without DDTREE ---------------------------------------------------------------------------------

WITHOUT = """
import types
from sglang_ddtree import compat, overlay

names = sorted(compat.INTERNALS["0.5.17"])
for name in names:
    pkgutil.resolve_name(name)
import sglang.srt.managers.scheduler
from sglang.srt import plugins
from sglang.srt.server_args import prepare_server_args


def snapshot():
    # Every name of every module and class of SGLang, with the object itself, so that no id is reused.
    found = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] != "sglang" or not isinstance(module, types.ModuleType):
            continue
        for name, value in list(vars(module).items()):
            found[f"{module_name}.{name}"] = value
            if isinstance(value, type) and value.__module__ == module_name:
                found |= {f"{module_name}.{name}.{inner}": item for inner, item in vars(value).items()}
    return found


def changed(before, after):
    return sorted(name for name in before if name not in after or after[name] is not before[name])


def added(before, after):
    known = {name.rpartition(".")[0] for name in before}
    return sorted(name for name in after if name not in before and name.rpartition(".")[0] in known)


before = snapshot()
paths = {name: list(module.__path__) for name, module in sys.modules.items()
         if name.split(".")[0] == "sglang" and getattr(module, "__path__", None)}
plugins.load_plugins()
after = snapshot()
report["changed"] = changed(before, after)
# Modules that become attributes of their package when something imports them are no patches.
report["added"] = [name for name in added(before, after) if not isinstance(after[name], types.ModuleType)]

from sglang.srt.speculative import spec_registry
report["registry"] = sorted(spec_registry._REGISTRY)

args = prepare_server_args(plain)
report["algorithm"] = args.speculative_algorithm
report["carried"] = hasattr(args, "_ddtree_config")
served = snapshot()
hooked = ("add_cli_args", "from_cli_args")
report["internals changed"] = [
    name for name in names
    if name.rpartition(".")[2] not in hooked and name in before and served.get(name) is not before[name]
]
report["internals seen"] = sum(name in before for name in names)
report["paths changed"] = [name for name, path in paths.items() if list(sys.modules[name].__path__) != path]
report["laid"] = overlay.is_laid()
report["activation"] = "sglang_ddtree.activation" in sys.modules
import importlib.util
report["worker"] = importlib.util.find_spec("sglang.srt.speculative.ddtree_worker") is not None
from sglang.srt.speculative import dflash_info
report["classes"] = hasattr(dflash_info, "DDTreeVerifyInput")

# Nor does an SGLang that DDTREE does not know keep an ordinary server from starting.
import sglang
from sglang.srt.speculative import spec_utils
sglang.__version__ = "0.5.99"
move = spec_utils.move_accept_tokens_to_target_kvcache
del spec_utils.move_accept_tokens_to_target_kvcache
report["unknown version starts"] = prepare_server_args(plain).speculative_algorithm is None
"""


def test_without_ddtree_sglang_keeps_its_own_behaviour(models):
    report = in_a_fresh_process(WITHOUT, models)
    args = "sglang.srt.server_args.ServerArgs"
    # Beside the three hooks only SGLang's own note that plugins were loaded.
    expected = [f"{args}.{name}" for name in ("__init__", "add_cli_args", "from_cli_args")]
    assert report["changed"] == sorted([*expected, "sglang.srt.plugins._plugins_loaded"])
    assert report["added"] == []
    assert report["registry"] == ["DDTREE"]
    assert report["algorithm"] is None and report["carried"] is False
    assert report["internals changed"] == [] and report["paths changed"] == []
    # All but a few that are inherited or members of an enum are looked at.
    assert report["internals seen"] >= len(compat.INTERNALS["0.5.17"]) - 3
    assert report["laid"] is report["activation"] is report["worker"] is report["classes"] is False
    assert report["unknown version starts"] is True


# --- With DDTREE ------------------------------------------------------------------------------------

WITH = """
from pathlib import Path
import sglang

home = Path(sglang.__file__).parent


def files():
    found = {}
    for folder, subfolders, names in os.walk(home):
        subfolders[:] = [name for name in subfolders if name != "__pycache__"]
        for name in names:
            stat = os.stat(os.path.join(folder, name))
            found[os.path.join(folder, name)] = [stat.st_size, stat.st_mtime_ns]
    return found


before = files()
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
import sglang.srt.managers.scheduler as scheduler
import sglang.srt.speculative.dflash_utils as dflash_utils
from sglang.srt.mem_cache import allocation_sizing
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.speculative import dflash_info, draft_worker_common, eagle_utils, spec_info
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang_ddtree import activation, overlay

NAMES = %(names)s
originals = {name: pkgutil.resolve_name(name) for name in NAMES}
held = {}
for name in NAMES:
    attribute = name.rpartition(".")[2]
    held[name] = sorted(
        module for module, loaded in list(sys.modules.items())
        if module.startswith("sglang.") and vars(loaded).get(attribute) is originals[name]
    )
own = {name: dict(vars(dflash_info))[name] for name in ("DFlashVerifyInput", "DFlashDraftInput")
       if hasattr(dflash_info, name)}
torch_native = ATTENTION_BACKENDS["torch_native"]
answering = {name: pkgutil.resolve_name(name) for name in %(answering)s}
args = prepare_server_args(ddtree)
report["laid before"] = overlay.is_laid()
report["hooked before"] = [name for name in NAMES if pkgutil.resolve_name(name) is not originals[name]]
report["answering"] = {name: pkgutil.resolve_name(name).__wrapped__ is answering[name] for name in answering}

# As the scheduler does.
worker = SpeculativeAlgorithm.from_string(args.speculative_algorithm).create_worker(args)
report["worker"] = [worker.__module__, worker.__name__, sys.modules[worker.__module__].__file__]
report["laid"] = overlay.is_laid()
report["own kept"] = [getattr(dflash_info, name) is value for name, value in own.items()]
report["classes"] = [issubclass(dflash_info.DDTreeVerifyInput, object), hasattr(dflash_info, "DDTreeDraftInput")]
report["file"] = str(Path(dflash_info.__file__).relative_to(home))
report["held"] = held
report["methods hooked"] = [
    pkgutil.resolve_name(name).__wrapped__ is originals[name] for name in %(methods)s
]
report["hooked"] = {
    name: all(
        vars(sys.modules[module])[name.rpartition(".")[2]].__wrapped__ is originals[name] for module in held[name]
    )
    for name in NAMES
}
report["scheduler"] = scheduler.validate_dflash_request is dflash_utils.validate_dflash_request
report["alloc"], report["headroom"] = {}, {}
for budget in (1, 3, 7, 15, 40):
    sized = prepare_server_args([*ddtree, "--speculative-ddtree-budget", str(budget)])
    report["alloc"][budget] = allocation_sizing.get_alloc_len_per_decode(sized)
    report["headroom"][budget] = allocation_sizing.get_req_to_token_extra_context_len(sized)
    report["reserve"] = allocation_sizing.get_alloc_reserve_per_decode(sized)
sized.override("test", page_size=16)
report["headroom with pages"] = allocation_sizing.get_req_to_token_extra_context_len(sized)
other = prepare_server_args(plain)
report["plain"] = [
    allocation_sizing.get_alloc_len_per_decode(other), allocation_sizing.get_req_to_token_extra_context_len(other)
]
algorithm = SpeculativeAlgorithm.from_string("DDTREE")
mask = object()
made = spec_info.create_dummy_verify_input(algorithm, args, mask, 16, False)
report["dummy"] = [type(made).__name__, made.draft_token_num, made.topk, made.custom_mask is mask, made.spec_steps]
shadow = prepare_server_args([*ddtree, "--speculative-ddtree-shadow-linear"])
made = spec_info.create_dummy_verify_input(algorithm, shadow, mask, 8, False)
report["dummy chain"] = [type(made).__name__, made.draft_token_num, made.topk, made.custom_mask is None]
made = spec_info.create_dummy_verify_input(algorithm, args, mask, 16, True)
report["dummy of the drafter"] = type(made).__name__
import types
dflash = types.SimpleNamespace(speculative_algorithm="DFLASH", speculative_num_draft_tokens=16)
made = spec_info.create_dummy_verify_input(SpeculativeAlgorithm.DFLASH, dflash, mask, 16, False)
report["dummy of DFLASH"] = type(made).__name__
served = ATTENTION_BACKENDS["torch_native"]
report["cpu backend"] = [
    served is not torch_native and served.__module__, "torch_native" in draft_worker_common._SUPPORTED_DRAFT_BACKENDS
]

once = {name: pkgutil.resolve_name(name) for name in NAMES}
verify_input = dflash_info.DDTreeVerifyInput
activation.activate()
overlay.lay()
report["again"] = [pkgutil.resolve_name(name) is once[name] for name in NAMES]
report["again"].append(dflash_info.DDTreeVerifyInput is verify_input)
report["paths"] = [len(package.__path__) for package in (sys.modules["sglang.srt.speculative"],
                                                         sys.modules["sglang.srt.layers.attention"])]
report["written"] = [str(Path(name).relative_to(home)) for name in set(files()) ^ set(before)]
report["touched"] = [name for name, state in files().items() if before.get(name) != state]
report["files"] = len(before)
"""


@pytest.fixture(scope="module")
def active(models):
    return in_a_fresh_process(WITH % {"names": HOOKED, "methods": HOOKED_METHODS, "answering": ANSWERING}, models)


def test_asking_for_the_worker_lays_the_overlay(active):
    assert active["laid before"] is False and active["laid"] is True
    module, name, file = active["worker"]
    assert (module, name) == ("sglang.srt.speculative.ddtree_worker", "DDTreeWorker")
    assert Path(file) == ROOT / "python" / "sglang" / "srt" / "speculative" / "ddtree_worker.py"
    # SGLang's module is extended, not replaced.
    assert active["file"] == "srt/speculative/dflash_info.py"
    assert active["own kept"] and all(active["own kept"])
    assert active["classes"] == [True, True]


def test_nothing_is_written_into_sglangs_folder(active):
    assert active["files"] > 1000
    assert active["written"] == [] and active["touched"] == []


def test_the_hooks_reach_every_module_that_imported_the_function(active):
    assert active["hooked"] == dict.fromkeys(HOOKED, True)
    assert "sglang.srt.managers.scheduler" in active["held"][HOOKED_FUNCTIONS[2]]
    # A method is found through its class, which every module shares.
    assert active["methods hooked"] == [True] * len(HOOKED_METHODS)
    # The answers are completed where the arguments are parsed, and nothing else is touched there.
    assert active["hooked before"] == [] and active["answering"] == dict.fromkeys(ANSWERING, True)
    assert active["scheduler"] is True
    # Each function is held by its own module at least; some others had imported it before.
    assert all(name.rpartition(".")[0] in active["held"][name] for name in HOOKED_FUNCTIONS)
    assert sum(len(modules) for modules in active["held"].values()) > len(HOOKED_FUNCTIONS)


def test_a_round_reserves_the_wider_of_block_and_tree(active):
    # The drafter's block is 8 wide, the tree budget + 1.
    assert active["alloc"] == {"1": 8, "3": 8, "7": 8, "15": 16, "40": 41}
    assert active["reserve"] == 2 * 41


def test_a_row_has_room_for_two_rounds_and_a_page(active):
    for budget, headroom in active["headroom"].items():
        assert headroom >= 2 * max(int(budget) + 1, BLOCK) + 1
    assert active["headroom with pages"] >= 2 * 41 + 16 - 1


def test_other_servers_sizes_stay(active):
    assert active["plain"] == [1, 4]
    assert active["dummy of DFLASH"] == "DFlashVerifyInput"


def test_a_dummy_verify_is_a_masked_tree_of_the_right_size(active):
    assert active["dummy"] == ["DDTreeVerifyInput", 16, 2, True, 7]
    assert active["dummy chain"] == ["DDTreeVerifyInput", BLOCK, 1, True]
    assert active["dummy of the drafter"] == "DFlashVerifyInput"


@pytest.mark.skipif(activation.requirements.has_gpu(), reason="a GPU has its own backends")
def test_the_cpus_backend_knows_trees(active):
    assert active["cpu backend"] == ["sglang.srt.layers.attention.torch_tree_mask", True]


def test_activating_twice_changes_nothing_more(active):
    assert active["again"] == [True] * (len(HOOKED) + 1)
    assert active["paths"] == [2, 2]


def test_a_request_with_images_is_aborted_once_they_are_attached():
    calls = []
    req = SimpleNamespace(set_finish_with_abort=lambda message: calls.append(("abort", message)))
    activation._image_inputs_hook(lambda req, images: calls.append(("attach", images)), req, "images")
    assert [name for name, _ in calls] == ["attach", "abort"]
    assert calls[0][1] == "images" and "does not support multimodal inputs yet" in calls[1][1]


def test_activation_hooks_what_is_listed_here_and_compat_knows_it():
    assert sorted(activation._HOOKS) == sorted(HOOKED)
    assert sorted(activation._ANSWER_HOOKS) == sorted(ANSWERING)
    assert {*HOOKED, *ANSWERING} <= set(compat.INTERNALS["0.5.17"])


# --- An SGLang that DDTREE does not know ------------------------------------------------------------


def starts(argv):
    prepare_server_args(argv)
    return True


def reason(argv):
    with pytest.raises(compat.UnsupportedSGLang) as error:
        prepare_server_args(argv)
    message = str(error.value)
    assert message.startswith("DDTREE cannot start: ")
    assert message.endswith("Supported SGLang versions: 0.5.17. Install one with: pip install sglang==0.5.17")
    return message


def test_the_installed_sglang_is_known(models):
    assert compat.problems("0.5.17") == []
    assert starts(ddtree(models))


@pytest.mark.parametrize("version", ["0.5.99", "0.5.16", "0.5.17.post1", "0.0.0"])
def test_another_version(version, models, monkeypatch):
    monkeypatch.setattr(sglang, "__version__", version)
    assert f"SGLang {version} is installed" in reason(ddtree(models))
    assert starts(plain(models))


def break_it(monkeypatch, name, replacement=None):
    parent = pkgutil.resolve_name(name.rpartition(".")[0])
    attribute = name.rpartition(".")[2]
    if replacement is None:
        monkeypatch.delattr(parent, attribute)
    else:
        monkeypatch.setattr(parent, attribute, replacement)


# Those that a start without DDTREE needs as well.
NEEDED_ANYWAY = ("ServerArgs.", "get_config", "CustomSpecAlgo", "Backend", "hybrid_arch", "allocation_sizing")
# Their base class has methods of the same name and parameters, so that a missing one does not show.
ATTENTION = "sglang.srt.layers.attention"
INHERITED = (
    "sglang.srt.constrained.llguidance_backend.GuidanceGrammar.apply_vocab_mask",
    "sglang.srt.constrained.xgrammar_backend.XGrammarGrammar.apply_vocab_mask",
    "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.can_run_graph",
    "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.capture_prepare",
    "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.execute",
    f"{ATTENTION}.torch_native_backend.TorchNativeAttnBackend.forward_extend",
    f"{ATTENTION}.triton_backend.TritonAttnBackend.init_forward_metadata",
    f"{ATTENTION}.triton_backend.TritonAttnBackend.init_forward_metadata_out_graph",
)
BREAKABLE = [
    name
    for name in compat.INTERNALS["0.5.17"]
    if name not in INHERITED and not any(part in name for part in NEEDED_ANYWAY)
]


@pytest.mark.parametrize("name", BREAKABLE)
def test_a_missing_internal(name, models, monkeypatch):
    break_it(monkeypatch, name)
    message = reason(ddtree(models))
    # Without its own a class still has the one that it inherits.
    inherits = name.endswith(("Sampler.forward", "TpModelWorker.forward_batch_generation"))
    how = "has no parameter" if inherits else "is missing"
    assert f"{name} {how}" in message
    # No bystander is accused; what hangs on the missing name is missing too.
    others = [other for other in compat.INTERNALS["0.5.17"] if not other.startswith(name)]
    assert not any(f"{other} " in message for other in others)
    assert starts(plain(models))


@pytest.mark.parametrize("name", [name for name in BREAKABLE if compat.INTERNALS["0.5.17"][name]])
def test_an_internal_with_another_signature(name, models, monkeypatch):
    def other(something_else):
        raise AssertionError("must not be called")

    break_it(monkeypatch, name, other)
    missing = sorted(set(compat.INTERNALS["0.5.17"][name]) - {"self", "cls"})
    assert f"{name} has no parameter {', '.join(missing)}" in reason(ddtree(models))
    assert starts(plain(models))


@pytest.mark.parametrize("name", sorted(set(compat.INTERNALS["0.5.17"]) - {*BREAKABLE, *INHERITED}))
def test_a_missing_internal_that_any_server_needs(name, monkeypatch):
    break_it(monkeypatch, name)
    named = [problem for problem in compat.problems("0.5.17") if problem.startswith(f"{name} ")]
    assert len(named) == 1


def test_a_missing_module(models, monkeypatch):
    import sglang.srt.speculative.eagle_info  # noqa: F401

    monkeypatch.setitem(sys.modules, "sglang.srt.speculative.eagle_info", None)
    monkeypatch.delattr(sys.modules["sglang.srt.speculative"], "eagle_info")
    assert "sglang.srt.speculative.eagle_info.EagleVerifyInput is missing" in reason(ddtree(models))
    assert starts(plain(models))


def test_every_mismatch_is_named(models, monkeypatch):
    gone = ["sglang.srt.managers.overlap_utils.FutureMap", "sglang.srt.speculative.spec_utils.GrammarTree.from_device"]
    for name in gone:
        break_it(monkeypatch, name)
    message = reason(ddtree(models))
    assert all(f"{name} is missing" in message for name in gone)


def test_an_added_parameter_does_no_harm(models, monkeypatch):
    name = "sglang.srt.speculative.eagle_utils.eagle_prepare_for_verify"

    def newer(verify_input, req_to_token_pool, batch, target_worker, added=None):
        raise AssertionError("must not be called")

    break_it(monkeypatch, name, newer)
    assert starts(ddtree(models))


# --- What SGLang asks of an algorithm ---------------------------------------------------------------


def test_the_algorithm_answers(monkeypatch):
    algorithm = SpeculativeAlgorithm.from_string("ddtree")
    assert algorithm is SpeculativeAlgorithm.from_string("DDTREE")
    assert algorithm.name == "DDTREE"
    true = ["is_some", "is_speculative", "is_dflash_family", "supports_target_verify_for_draft"]
    true += ["supports_grammar_overlap"]
    false = ["is_none", "is_dflash", "is_eagle", "is_eagle3", "is_dspark", "is_ngram", "is_standalone"]
    false += ["is_frozen_kv_mtp", "has_draft_kv", "need_topk", "carries_draft_hidden_states"]
    false += ["supports_ragged_verify"]
    assert {name: getattr(algorithm, name)() for name in true} == dict.fromkeys(true, True)
    assert {name: getattr(algorithm, name)() for name in false} == dict.fromkeys(false, False)
    graphs = SimpleNamespace(decode=SimpleNamespace(bs=[1, 8, 32]))
    published = SimpleNamespace(
        _ddtree_config=DDTreeConfig(budget=15, block_size=8), cuda_graph_config=graphs, max_running_requests=48
    )
    monkeypatch.setattr("sglang.srt.runtime_context.get_server_args", lambda: published)
    width = algorithm.get_num_tokens_per_req_for_target_verify
    assert width(16, is_draft_worker=False) == 16
    # SGLang's graph runner asks with the target's width for the drafter as well.
    assert width(16, is_draft_worker=True) == 8
    # Packed rounds: of the most tokens that all requests share, a request's part.
    published._ddtree_config = DDTreeConfig(budget=63, block_size=8, auto=True)
    assert width(64, is_draft_worker=False) == 1024 // 32 and width(64, is_draft_worker=True) == 8
    published.max_running_requests = 4
    assert width(64, is_draft_worker=False) == 64
    graphs.decode.bs = None
    assert width(64, is_draft_worker=False) == 64


def test_the_algorithm_has_all_that_a_built_in_one_has():
    """SGLang calls these without asking whose algorithm it is."""
    builtin = {name for name, value in vars(SpeculativeAlgorithm).items() if callable(value) and name[0] != "_"}
    lacking = builtin - set(dir(SpeculativeAlgorithm.from_string("DDTREE")))
    # Class methods of the enum itself.
    assert lacking <= {"from_string", "register"}


def test_the_future_map_is_sglangs(monkeypatch):
    import sglang.srt.managers.overlap_utils as overlap_utils

    given = []
    monkeypatch.setattr(overlap_utils, "FutureMap", lambda *args: given.append(args) or "map")
    algorithm = SpeculativeAlgorithm.from_string("DDTREE")
    assert algorithm.create_future_map("cpu", "pool", needs_cpu_seq_lens=False) == "map"
    assert given == [("cpu", algorithm, "pool", False, False)]


def test_no_built_in_algorithm_is_hidden():
    for name in ("EAGLE", "EAGLE3", "DFLASH", "NGRAM", "STANDALONE"):
        assert isinstance(SpeculativeAlgorithm.from_string(name), SpeculativeAlgorithm)


# --- The hooks in isolation -------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [None, "EAGLE", "DFLASH"])
def test_hooks_leave_other_algorithms_alone(algorithm):
    server_args = SimpleNamespace(speculative_algorithm=algorithm, page_size=1)
    assert activation._alloc_len_hook(lambda a: 5, server_args) == 5
    assert activation._row_headroom_hook(lambda a: 6, server_args) == 6
    given = []
    activation._dummy_verify_input_hook(lambda *a: given.append(a), "spec", server_args, "mask", 4, False)
    assert given == [("spec", server_args, "mask", 4, False)]


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("budget, slots", [(3, 8), (63, 64)])
def test_hooks_never_take_away_what_sglang_reserves(budget, slots, page_size):
    config = DDTreeConfig(budget=budget, block_size=BLOCK)
    server_args = SimpleNamespace(speculative_algorithm="DDTREE", page_size=page_size, _ddtree_config=config)
    assert config_of(server_args) is config
    assert activation._alloc_len_hook(lambda a: 1, server_args) == slots
    assert activation._alloc_len_hook(lambda a: 1000, server_args) == 1000
    assert activation._row_headroom_hook(lambda a: 1, server_args) >= 2 * slots + page_size - 1
    assert activation._row_headroom_hook(lambda a: 1000, server_args) == 1000


def test_an_incomplete_installation_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(overlay, "__file__", str(tmp_path / "sglang_ddtree" / "overlay.py"))
    with pytest.raises(FileNotFoundError, match="reinstall the package sglang-ddtree"):
        overlay.overlay_root()
    # Beside us in site-packages lies SGLang itself, which is no overlay.
    (tmp_path / "sglang" / "srt").mkdir(parents=True)
    (tmp_path / "sglang" / "__init__.py").touch()
    with pytest.raises(FileNotFoundError, match="no overlay folder"):
        overlay.overlay_root()
    (tmp_path / "sglang_ddtree" / "overlay" / "srt").mkdir(parents=True)
    assert overlay.overlay_root() == tmp_path / "sglang_ddtree" / "overlay"
