# Everything runs in .venv, made from pyproject.toml and constraints.txt.  No C compiler is needed.
PYTHON ?= python3
WORKERS ?= 2
GPU_WORKERS ?= 8
MINUTES ?= 5
SEED ?=
TURN ?=
ISA ?=
CASES ?=
FAST := arch debug errors files ir lower ops opt plan runtime schedule sym tune \
	codegen/test_loops.py codegen/test_reductions.py e2e/test_explain.py \
	frontend/test_capture.py frontend/test_normalise.py
VENV := .venv
BIN := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
STAMP := $(VENV)/installed

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start hundreds of processes, and without bytecode each would compile lenz's source.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup test test-all test-fast test-warm test-python check pytest lint typecheck format demo bench bench-start bench-ops bench-chains options clean \
	test-gpu test-triton bench-gpu fuzz models architectures opinfo special accuracy errors leaks package docs

help:
	@echo "make test     install what is missing, then lint, check types, run tests (similar cases are sampled)"
	@echo "              ISA=avx2 runs the tests as on a machine without AVX-512"
	@echo "              TURN=n takes another sample, as .ci/run does for each commit"
	@echo "make test-all  the same with all cases: up to an hour"
	@echo "make test-fast  tests for a minute, without lint and types"
	@echo "make test-warm  whole programs twice: the second run takes its graphs from the first one's cache"
	@echo "make test-python  a part of torch's op database by plans in Python, without native code"
	@echo "make demo     run real models with eager and lenz; compare results and times"
	@echo "make bench    time lenz, eager and torch's default backend (which needs g++)"
	@echo "make bench-ops  list ops that are slower than eager"
	@echo "make bench-chains  list random programs of a few ops that are"
	@echo "make models   compare about 60 models with eager and float64; writes docs/models.md"
	@echo "make architectures   the same with hundreds of architectures of transformers, small ones: about an hour"
	@echo "make opinfo   compare all ops of torch's database with eager, in every dtype; writes docs/coverage.md"
	@echo "make special  the same with NaN, infinities and zeros in all inputs"
	@echo "make leaks    measure memory and files over 1,000 compilations and 10^6 calls"
	@echo "make accuracy compare the errors of eager and lenz against float64, for 1 to 10^6 elements"
	@echo "make test-triton   check all GPU kernels without a GPU: resources and results"
	@echo "make fuzz     run random programs (MINUTES=5 SEED=n); failures are shrunk and printed"
	@echo "make test-gpu, make bench-gpu   need a GPU, and a Python with torch for it"
	@echo "make docs     build the documentation site, into site/"
	@echo "make package  build the wheel and the sdist, into dist/"
	@echo "make format   format the code and sort its imports"
	@echo "make options  print the table of options"
	@echo "make errors   print who raises for each bad input of torch's database"
	@echo "make clean    delete .venv and the caches of tools"

# Wheels only: a package that would need a compiler is an error here and not later.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 10) and 'lenz needs Python 3.10 or newer')"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --only-binary=:all: -c constraints.txt -e ".[test,demo,docs,recipes]"
	@touch $(STAMP)

setup: $(STAMP)

# pytest comes last, so that its closing line is the last line.
test: check
	$(MAKE) --no-print-directory pytest

test-all: check
	$(MAKE) --no-print-directory pytest CASES=--all

test-fast:
	@$(MAKE) --no-print-directory pytest CASES="--fast $(FAST:%=tests/%)"

# A wrong cache hit gives a wrong number in the second run.
test-warm: $(STAMP)
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && for run in cold warm; do \
		TEST_CACHE="$$folder" OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) tests/e2e tests/models \
		|| exit; done

# Plans run by their Python functions, the fallback of native code: CASES=--all for all parts.
test-python: $(STAMP)
	@OMP_NUM_THREADS=1 TEST_NATIVE=0 $(BIN)/python -m pytest -q -n $(WORKERS) $(CASES) tests/e2e/test_sweep.py

check: lint typecheck

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

typecheck: $(STAMP)
	$(BIN)/mypy

# Workers share the cores, so that each test process gets one thread unless it asks for more.
# An idle worker takes over tests of another one: the longest tests come together at the end.
pytest: $(STAMP)
	@OMP_NUM_THREADS=1 TEST_ISA=$(ISA) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(if $(TURN),--turn $(TURN)) $(CASES)

# No GPU is needed: Triton compiles for absent GPUs, and its interpreter runs here.
test-triton: $(STAMP)
	@$(BIN)/python -m pytest -q --all --all-kernels tests/codegen/test_triton_cubins.py
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --all --all-kernels tests/codegen -k triton

# NaN, infinities and zeros in the inputs of all ops.
special: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.e2e.sweep --special --dtypes float32,bfloat16,float64

models: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.models --jobs $(WORKERS)

# FLAGS="--only bert mixtral" or "--device cuda".
architectures: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.models --architectures --jobs $(WORKERS) $(FLAGS)

# FLAGS="--lengths 10000000 --ops cumsum sum" or "--device cuda"; fails where docs/numerics.md is broken.
accuracy: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.e2e.accuracy $(FLAGS)

# Resumes where it was stopped; OPINFO=--fresh starts over, OPINFO=--again repeats failures.
opinfo: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/python tests/e2e/opinfo.py --workers $(WORKERS) $(OPINFO)

# Memory, files and maps over 1,000 cycles, 10^6 calls and 1,000 errors: about an hour.
# FLAGS="--cycles 100" or "--device cuda".
leaks: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.e2e.leaks $(FLAGS)

# FLAGS="--device cuda" or "--large" or "--way triton" or "--way numbers"; see tests/fuzz.
fuzz: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(FLAGS)

docs: $(STAMP)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

package: $(STAMP)
	$(BIN)/python -m build --no-isolation

format: $(STAMP)
	$(BIN)/ruff check --select I --fix .
	$(BIN)/ruff format .

demo: $(STAMP)
	@$(BIN)/python -m examples.demo

bench: $(STAMP)
	@$(BIN)/python -m benchmarks

# First results of new processes: eager, aot_eager, lenz, the peer, and files. About half an hour.
bench-start: $(STAMP)
	@$(BIN)/python -m benchmarks start

# Ops that are slower than eager. FLAGS="--above 2 --forms last sum" for images with channels last, and sums.
bench-ops: $(STAMP)
	@$(BIN)/python -m benchmarks.ops $(FLAGS)

# Random programs that are slower than eager. FLAGS="--training --minutes 20 --seed 1000"
bench-chains: $(STAMP)
	@$(BIN)/python -m benchmarks.chains $(FLAGS)

# The pinned torch is for CPUs: these two run in PYTHON, unchanged.
test-gpu:
	@OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q -n $(GPU_WORKERS) --all tests/gpu

bench-gpu:
	@$(PYTHON) -m benchmarks.gpu

options: $(STAMP)
	@$(BIN)/python -m lenz options

errors: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -s tests/e2e/test_error_inputs.py --all

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
