# Every target sets up .venv by itself when it is missing or older than the files that define it.
PYTHON ?= python3
PY := .venv/bin/python
STAMP := .venv/installed
SITE := .venv-site/bin/python
SITE_STAMP := .venv-site/installed

# Bytecode is kept, below build/, where the environment forbids it, too: half of the time of collecting tests is parsing.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX := $(CURDIR)/build/bytecode

.PHONY: demo test test-all coverage test-compiled test-device test-guarded test-lanes test-newest fuzz check format bench docs site package clean

demo: $(STAMP)
	$(PY) -m docs.examples.g2p demo

# A process for each core, four at most, of one thread each.
TESTS := pytest -n logical --maxprocesses 4 --dist worksteal
PYTEST := $(PY) -m $(TESTS)

# What is worth its time at every change: tests/conftest.py says what it leaves out. On the pretended device that is what
# holds the device itself, the budgets and how loops are replayed.
test: $(STAMP)
	$(PYTEST)
	$(PYTEST) --device tests/device tests/checkpoint/test_replay.py

test-all: $(STAMP)
	$(PYTEST) --all

# Lines that tests run, by file and in all. What numba compiles is not counted, so tests of kernels run again with kernels
# as plain Python, those of test_methods.py as far as they get, and those of devices on the pretended one. Tests that
# measure memory or look at frames may fail here; on Python 3.11 what follows effects runs within a tracer, unseen.
COVERAGE := $(PY) -m coverage
AS_PYTHON := -p tests.support.kernels_as_python -W ignore::RuntimeWarning
OF_KERNELS := kernels/test_kernels kernels/test_kernel_slots kernels/test_kernel_infinities kernels/test_regroup \
	beam/test_beam_kernels attention/test_past risk/test_edit_distance loop/test_linear_recurrence \
	packed/operations/test_packed_losses packed/operations/test_packed_transducer \
	ordering/test_graphs ordering/test_permutation ordering/test_block_masks
coverage: $(STAMP)
	rm -rf build/coverage && mkdir -p build/coverage
	-$(COVERAGE) run -m $(TESTS) --all
	-$(COVERAGE) run -m $(TESTS) --device tests/device
	-$(COVERAGE) run -m pytest --all $(AS_PYTHON) $(OF_KERNELS:%=tests/%.py)
	-timeout 130 $(COVERAGE) run -m pytest --all $(AS_PYTHON) tests/ordering/test_methods.py
	$(COVERAGE) combine --quiet
	$(COVERAGE) report

# Every test of loops with compiled loops; `test` has some of them.
test-compiled: $(STAMP)
	$(PYTEST) --all --compiled tests/loop tests/checkpoint

# Loops, arrays, packed tensors, attention, beam search and risks on a pretended CUDA device, which g++ builds once. What
# is in tests/compiler names its targets, and runs without one.
ON_DEVICE := device tensor_array loop checkpoint compiled packed attention beam risk test_gpu.py test_gpu_compiled.py
test-device: $(STAMP)
	$(PYTEST) --device $(ON_DEVICE:%=tests/%)

# The same and those of compiled loops, in a form that checks each address that a loop touches.
test-guarded: $(STAMP)
	$(PYTEST) --all --compiled --guarded tests/loop tests/checkpoint
	$(PYTEST) --all --guarded tests/compiled tests/compiler

# What device text gives, its lanes as coroutines, in numbers and an order that SEED draws; and each text as PTX.
SEED ?= 0
test-lanes: $(STAMP)
	$(PYTEST) --all tests/compiler/test_device_*.py
	$(PYTEST) --all --lanes $(SEED) tests/compiled $(LOOPS:%=tests/compiler/test_%.py)
LOOPS := emitter_loops emitter_math emitter_random emitter_team operations

# What uses transformers, with the newest releases that can be had, in a Python of its own: a release of theirs may turn
# it red, so it is for people and not for CI. NEWEST= pins some: make test-newest NEWEST='transformers peft torch==2.13.0'
NEWEST ?= transformers peft torch
NEWER := .venv-newest/bin/python
test-newest:
	$(PYTHON) -m venv .venv-newest
	$(NEWER) -m pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager $(NEWEST) -e '.[dev]'
	$(NEWER) -m pytest -n logical --maxprocesses 4 --dist worksteal -W 'default:tensorloop.hf was tried:UserWarning' \
		tests/hf tests/loop tests/packed

# Random loops, compiled and not, for a night: what differs is a find. A run that was stopped goes on; FUZZ= has options
# (--seed 20000, --out build/more, --guarded). `python tests/fuzz/triage.py` shows the finds in groups.
PROGRAMS ?= 20000
fuzz: $(STAMP)
	$(PY) -W ignore tests/fuzz/run.py --programs $(PROGRAMS) --shards $(shell nproc 2>/dev/null || echo 1) $(FUZZ)

check: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright --warnings
	$(PY) -m mypy

format: $(STAMP)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# The short set of every script in profiling/; peers are found by JAX_PYTHON and the like: see profiling/README.md.
bench: $(STAMP)
	$(PY) profiling/bench.py

# The documents are plain Markdown: every Python block in them is run and every link between them followed.
docs: $(STAMP)
	$(PYTEST) --all tests/house/test_docs.py tests/house/test_notebooks.py

# docs/ with search and an API page for every public name, in build/site; warnings are errors. To read it:
# python -m http.server -d build/site
site: $(SITE_STAMP)
	NO_MKDOCS_2_WARNING=1 $(SITE) -m mkdocs build --strict --quiet

# What an index would be given, as it would look at it.
package: $(SITE_STAMP)
	rm -rf build/dist
	$(SITE) -m hatchling build --directory build/dist
	$(SITE) -m twine check --strict build/dist/*

clean:
	rm -rf .venv .venv-newest .venv-site .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist
	find . -type d -name __pycache__ -prune -exec rm -rf {} +

# The stamp comes last, so that an installation cut short is taken up again.
$(STAMP): pyproject.toml constraints.txt
	@echo "Setting up .venv (the first time takes a few minutes)"
	@$(PYTHON) -m venv .venv
	@$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

$(SITE_STAMP): docs/requirements.txt
	@echo "Setting up .venv-site"
	@$(PYTHON) -m venv .venv-site
	@$(SITE) -m pip install --quiet --disable-pip-version-check -r docs/requirements.txt
	@touch $@
