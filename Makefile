# Everything runs in .venv, which the first targets make from constraints.txt.
VENV := .venv
PYTHON := $(VENV)/bin/python
FOR_DEMO := $(VENV)/.for-demo
SETUP := $(VENV)/.set-up
COMPILED := $(VENV)/.compiled
PYTHON3 ?= python3

.PHONY: help demo example fuzz fuzz-models mutants test test-all test-lowest test-many test-pairs test-strict test-gpu gpu-check check format schemas reliability bench bench-plan bench-strategies bench-runtime bench-mixed bench-gpu bench-predictions clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# Pinned versions: the newest torch would bring several GB of CUDA packages. Where the registry's own build of the pinned
# one has CUDA too (PyPI on Linux), add PIP_ARGS='--extra-index-url https://download.pytorch.org/whl/cpu'.
# pip compiles one file after another, which takes longer than installing; files for newer Pythons do not compile.
# What packages have as tests nobody imports.
define set_up
	$(PYTHON3) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Spindle needs Python 3.11 or newer; try make PYTHON3=python3.12")'
	$(PYTHON3) -m venv $(VENV)
	$(PYTHON) -m pip install --quiet --no-compile --constraint constraints.txt $(PIP_ARGS) --editable '.[$(1)]'
	$(PYTHON) -m compileall -qq -j 0 -x '/tests?/' $(VENV)/lib || true
	touch $(2)
endef

# The demo alone takes less than half of what the tests do, and nothing more where those are installed.
$(FOR_DEMO): pyproject.toml constraints.txt
	$(call set_up,demo,$@)

COMMA := ,
$(SETUP): pyproject.toml constraints.txt
	$(call set_up,demo$(COMMA)dev,$(FOR_DEMO) $@)

# numba compiles the search for plans in 40 s and keeps it. Tests that begin at once would each compile it.
$(COMPILED): $(SETUP) $(wildcard src/spindle_cli/plan/search/*.py src/spindle_cli/plan/refine/*.py)
	$(VENV)/bin/spindle plan examples/ci/profile.json --cluster configs/clusters/a800-1x8.yaml -o $@.yaml >/dev/null
	touch $@

demo: $(FOR_DEMO)  ## train a real multi-task, multi-modal model by a plan, and prove that it is the same model
	$(PYTHON) scripts/demo.py $(DEMO_ARGS)

example: $(SETUP)  ## profile to export of three tasks of Hugging Face's own classes; leaves build/hf-example
	rm -rf build/hf-example
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" STEPS=2 examples/hf_multi_task/run.sh build/hf-example

test: $(SETUP) $(COMPILED)  ## the whole test suite
	@# Tests start many Pythons; where PYTHONDONTWRITEBYTECODE is set, each would compile all that it imports.
	@# Files of tests are compiled by pytest, in its own way.
	$(PYTHON) -m compileall -q -j 2 --invalidation-mode checked-hash -x '/test_[^/]*\.py$$' src scripts tests
	$(PYTHON) scripts/run_tests.py $(TEST_ARGS)

test-all:  ## the suite with what takes long and shows of more cases what other tests show of one
	$(MAKE) test TEST_ARGS="--all $(TEST_ARGS)"

test-many: $(SETUP)  ## the properties that hold of random inputs, on nine times as many of them
	$(PYTHON) -m pytest --hypothesis-profile many -m "hypothesis and not processes" $(TEST_ARGS)

test-strict: $(SETUP)  ## the runtime's exactness tests over a backend as strict as NCCL; about 3 minutes
	SPINDLE_BACKEND=strict-serial $(PYTHON) -m pytest tests/runtime/test_training_is_exact.py tests/runtime/test_split_layers.py $(TEST_ARGS)

test-pairs: $(SETUP)  ## train plans that say two things at once, each with each, against plain PyTorch; about 2 minutes
	$(PYTHON) -m pytest tests/runtime/test_pairs.py $(TEST_ARGS)
	PYTHONPATH=tests $(PYTHON) tests/runtime/pair_table.py

# Without PIP_ARGS (above) it takes a build of torch with CUDA, of several GB; it runs without a GPU too.
test-lowest:  ## the tests that start no workers, and exact training by some, with the lowest versions that pyproject.toml claims
	$(PYTHON3) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install --quiet --constraint constraints-lowest.txt $(PIP_ARGS) --editable '.[demo]' \
	  pytest pytest-timeout pytest-xdist hypothesis jsonschema
	.venv-lowest/bin/python -m pytest -n 2 --dist loadfile -m "not processes and not long" $(TEST_ARGS)
	.venv-lowest/bin/python -m pytest -m "processes and not long" tests/runtime/test_training_is_exact.py $(TEST_ARGS)

test-gpu: $(SETUP)  ## the tests that need a GPU; skipped with a reason where there is none
	$(PYTHON) -m pytest -rs tests/gpu $(TEST_ARGS)

check: $(SETUP)  ## lint, format and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(SETUP)  ## format the code and sort its imports
	$(VENV)/bin/ruff check --fix-only .
	$(VENV)/bin/ruff format .

gpu-check: $(SETUP)  ## everything that only a GPU can show, in nine minutes: a table and logs in build/gpu-check
	$(PYTHON) scripts/gpu_check.py $(GPU_CHECK_ARGS)

bench: bench-plan bench-strategies bench-predictions bench-runtime bench-mixed bench-gpu  ## every benchmark

bench-plan: $(SETUP)  ## plan sixty problems, and compare with the frozen plans; about 10 minutes (BENCH_ARGS=--quick: 3)
	$(PYTHON) scripts/bench_plan.py $(BENCH_ARGS)

bench-strategies: $(SETUP)  ## plan the paper's workloads on every cluster by every strategy; about an hour
	$(PYTHON) scripts/bench_strategies.py $(BENCH_ARGS)

bench-runtime: $(SETUP)  ## train by a plan against DDP and FSDP2 on two hosts with a shaped link (as root); about 10 minutes
	$(PYTHON) scripts/bench_runtime.py $(BENCH_ARGS)

bench-mixed: $(SETUP)  ## train by plans for two hosts of unequal speed against DDP and even shares (as root); about an hour
	$(PYTHON) scripts/bench_mixed.py $(BENCH_ARGS)

reliability: $(SETUP)  ## write the table of docs/reference/faults.md from the faults that tests inject
	PYTHONPATH=tests $(PYTHON) tests/reliability/fault_table.py

bench-predictions: $(SETUP)  ## simulated against measured iterations on this CPU; about 5 minutes
	$(PYTHON) scripts/bench_predictions.py $(BENCH_ARGS)

fuzz-models: $(SETUP)  ## look for small random models that would be trained as others than in plain PyTorch; about 20 minutes
	PYTHONPATH=scripts $(PYTHON) scripts/fuzz_models.py $(FUZZ_ARGS)

fuzz: $(SETUP) $(COMPILED)  ## damage files at random and see how every command ends; a minute, with a new seed each time
	PYTHONPATH=scripts $(PYTHON) scripts/fuzz.py $(FUZZ_ARGS)

mutants: $(SETUP)  ## put small bugs into copies of the code, and see whether the tests notice; about an hour
	PYTHONPATH=scripts $(PYTHON) -m mutants $(MUTANTS_ARGS)

bench-gpu: $(SETUP)  ## measure the paper's workloads at full size on one GPU; says so where there is none
	$(PYTHON) scripts/bench_gpu.py $(BENCH_ARGS)

schemas: $(SETUP)  ## write schemas/*.json and docs/reference/ from the code's types
	$(PYTHON) scripts/make_schemas.py

clean:  ## remove the environment and what tools left behind
	rm -rf $(VENV) .venv-lowest .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find src scripts tests -name __pycache__ -prune -exec rm -rf {} +
