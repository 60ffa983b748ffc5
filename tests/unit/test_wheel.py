"""The wheel: what it carries, and that DDTREE works from it without touching SGLang's own folder."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE, OVERLAY, STAND_INS = "sglang_ddtree/", "sglang_ddtree/overlay/", "sglang_ddtree/cpu/site/sgl_kernel/"

# Runs with the unpacked wheel first on the path; whether SGLang finds the entry point in it is part of the test.
CHILD = """
import json, sys
from importlib.metadata import entry_points
from pathlib import Path

from sglang.srt.plugins import load_plugins
load_plugins()

import sglang, sglang_ddtree
from sglang_ddtree import activation, cpu, overlay
activation.activate()

import sglang.srt.speculative.ddtree_sampling
import sglang.srt.speculative.ddtree_topk
import sglang.srt.speculative.ddtree_utils
import sglang.srt.speculative.ddtree_worker as worker
from sglang.srt.layers.attention import torch_tree_mask
from sglang.srt.speculative import dflash_info
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

new = [name for name in sys.modules if name.startswith("sglang.") and ("ddtree" in name or "tree_mask" in name)]
print("REPORT" + json.dumps({
    "plugin": sglang_ddtree.__file__,
    "overlay": str(overlay.overlay_root()),
    "stand-ins": [entry for entry in sys.path if entry == str(cpu.SITE)],
    "sglang": sglang.__file__,
    "own modules": {name: sys.modules[name].__file__ for name in new},
    "extended": [dflash_info.__file__, *sorted(dflash_info.__ddtree_overlay__)],
    "classes": [hasattr(dflash_info, name) for name in ("DFlashVerifyInput", "DDTreeVerifyInput", "DDTreeDraftInput")],
    "worker": worker.DDTreeWorker.__mro__[1].__name__,
    "algorithm": SpeculativeAlgorithm.from_string("ddtree").name,
    "entry points": [point.value for point in entry_points(group="sglang.srt.plugins") if point.name == "ddtree"],
}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    command += ["--disable-pip-version-check", "-w", folder, "."]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def names(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def sources(folder):
    """Every file of a source folder, relative to it; caches aside."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)) for path in paths if "__pycache__" not in path.parts}


def test_it_carries_every_source_file_and_nothing_else(names):
    package, overlay = sources(ROOT / "python" / "sglang_ddtree"), sources(ROOT / "python" / "sglang")
    assert {"plugin.py", "compat.py", "cpu/site/sgl_kernel/__init__.py"} <= package
    assert {"srt/speculative/ddtree_worker.py", "srt/speculative/dflash_info.py"} <= overlay
    expected = {PACKAGE + name for name in package} | {OVERLAY + name for name in overlay}
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert len(names) == len(set(names))
    assert f"{STAND_INS}__init__.py" in names


def test_it_puts_nothing_into_other_packages(names):
    (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
    assert {name.split("/")[0] for name in names} == {"sglang_ddtree", info}
    # With it the overlay would be a package that hides SGLang's.
    assert f"{OVERLAY}__init__.py" not in names


def test_its_metadata(wheel, names):
    with zipfile.ZipFile(wheel) as archive:
        (entry,) = (name for name in names if name.endswith("entry_points.txt"))
        (metadata,) = (name for name in names if name.endswith("METADATA"))
        lines = [line.strip() for line in archive.read(entry).decode().splitlines() if line.strip()]
        described = archive.read(metadata).decode()
    assert lines == ["[sglang.srt.plugins]", "ddtree = sglang_ddtree.plugin:load"]
    assert "\nRequires-Dist: sglang==0.5.17\n" in described
    assert wheel.name.endswith("-py3-none-any.whl")
    assert any(name.endswith("LICENSE") for name in names)


@pytest.fixture(scope="module")
def report(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    # What the plugin must arrange by itself is not inherited from a test process that already has it.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")}
    environment = {**inherited, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CHILD], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("REPORT"))
    return folder, json.loads(line.removeprefix("REPORT"))


def test_it_works_unpacked(report):
    folder, found = report
    assert found["plugin"] == str(folder / "sglang_ddtree" / "__init__.py")
    assert found["overlay"] == str(folder / "sglang_ddtree" / "overlay")
    assert all(entry.startswith(str(folder)) for entry in found["stand-ins"])
    assert found["entry points"] == ["sglang_ddtree.plugin:load"]
    assert found["algorithm"] == "DDTREE"
    assert found["worker"] == "DFlashWorkerV2"
    assert found["classes"] == [True, True, True]


def test_its_modules_come_from_the_overlay_inside_it(report):
    folder, found = report
    overlay = folder / "sglang_ddtree" / "overlay"
    expected = {"ddtree_worker", "ddtree_utils", "ddtree_topk", "ddtree_sampling", "torch_tree_mask"}
    assert {name.rpartition(".")[2] for name in found["own modules"]} >= expected
    for name, file in found["own modules"].items():
        assert file == str(overlay.joinpath(*name.split(".")[1:]).with_suffix(".py"))
    # SGLang's own module stays SGLang's, extended in memory.
    original, extension = found["extended"]
    assert Path(original) == Path(found["sglang"]).parent / "srt" / "speculative" / "dflash_info.py"
    assert extension == str(overlay / "srt" / "speculative" / "dflash_info.py")
    assert not Path(original).is_relative_to(folder)
    assert "DDTree" not in Path(original).read_text()
