## make serve     a server on whatever device there is, with one answer to look at
## make test      the whole CPU suite; TESTS=tests/unit for one folder
## make test-gpu  what needs a GPU; skipped with a reason elsewhere
## make soak      mixed load against no speculation, 20 minutes on a CPU, 8 on a GPU
## make mutations faults put in on purpose, each of which a test must notice: about ten minutes
## make bench     the benchmarks, on a GPU, into BENCH_OUT; BENCH_FLAGS=--smoke tries them out anywhere
## make lint      ruff and mypy, changes nothing; make format changes files
## make support-table   write the README's support table anew, from the tests' markers and docs/gpu-tests.txt
## make venv      the virtual environment alone
## make model     fetch and convert SmolLM2-135M-Instruct
## Variables: PORT, BUDGET, TOPK_CAP, SERVE_FLAGS, TESTS, BENCH_OUT, BENCH_FLAGS, PYTHON, VENV

VENV ?= .venv
PYTHON ?= python3
PORT ?= 30000
BUDGET ?=
TOPK_CAP ?= 8
SERVE_FLAGS ?=
TESTS ?= tests
BENCH_OUT ?= results
BENCH_FLAGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.ddtree-installed
SOURCES := python/sglang_ddtree scripts benchmarks tests python/sglang

.PHONY: help venv model serve test test-gpu soak mutations bench lint format support-table clean

help:
	@sed -n 's/^## //p' $(MAKEFILE_LIST)

venv: $(STAMP)

# The stamp comes last: an interrupted install is repeated.
$(STAMP): pyproject.toml scripts/requirements-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --progress-bar on -r scripts/requirements-dev.txt -e .
	touch $@

model: venv
	$(BIN)/python scripts/smollm2.py

serve: model
	$(BIN)/python scripts/serve.py --port $(PORT) $(if $(BUDGET),--budget $(BUDGET)) --topk-cap $(TOPK_CAP) -- $(SERVE_FLAGS)

test: model
	$(BIN)/python -m pytest $(TESTS)

test-gpu: model
	$(BIN)/python -m pytest -m gpu $(TESTS)

soak: model
	$(BIN)/python tests/soak.py

mutations: venv
	$(BIN)/python tests/mutations.py

# An interrupted run goes on where it stopped. bench_tree.py times kernels: there is nothing to try without a GPU.
bench: model
	$(BIN)/python benchmarks/bench_round.py --out $(BENCH_OUT)/bench_round $(BENCH_FLAGS)
	$(BIN)/python benchmarks/bench_serving.py --out $(BENCH_OUT)/bench_serving $(BENCH_FLAGS)
	$(BIN)/python benchmarks/bench_replay.py --out $(BENCH_OUT)/bench_replay $(BENCH_FLAGS)
	$(BIN)/python benchmarks/bench_simulated.py --out $(BENCH_OUT)/bench_simulated $(BENCH_FLAGS)
	$(if $(findstring --smoke,$(BENCH_FLAGS)),,$(BIN)/python benchmarks/bench_tree.py --out $(BENCH_OUT)/bench_tree)

lint: venv
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	@# One file at a time: they are modules of SGLang's package, not of a package of ours.
	for f in $$(find python/sglang -name '*.py'); do $(BIN)/mypy --no-namespace-packages $$f || exit 1; done

format: venv support-table
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

# From source text alone: any Python will do.
support-table:
	$(PYTHON) scripts/support_table.py

clean:
	rm -rf $(VENV) .cache dist build models/SmolLM2-135M-Instruct
