# Targets that need .venv create it, and update it after a change of pyproject.toml or constraints.txt.
.PHONY: venv serve test pytest test-deep lint site bench gpu-check
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Variables of `make serve`: address, model and replicas. ARGS takes options of `headway serve`, and fields as key=value.
HOST ?= 127.0.0.1
PORT ?= 8000
MODEL ?=
DTYPE ?=
REPLICAS ?=
PROFILE ?= default
ARGS ?=

venv: $(STAMP)

# torch is installed first and alone. With an exact version pip takes the CPU wheel if an index offers one; without one
# it may install gigabytes of CUDA packages.
$(STAMP): pyproject.toml constraints.txt
	@echo 'Installing Headway into $(VENV): a minute or two, only the first time and after an update ...'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt torch==2.13.0
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@$(BIN)/python -m compileall -q serve_app replicas router  # Python does so itself only where it may write.
	@touch $@

# Runs in the foreground; SIGTERM or Ctrl-C stops everything that it started.
serve: $(STAMP)
	@exec $(BIN)/python -m serve_app.cli.main serve --host $(HOST) --port $(PORT) --profile $(PROFILE) \
		$(if $(MODEL),--model '$(MODEL)') $(if $(DTYPE),--dtype '$(DTYPE)') $(if $(REPLICAS),--num-replicas '$(REPLICAS)') \
		$(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Three processes share the tests (tests/conftest.py). The tests that start Ray take longest and go first.
TEST_PROCESSES := --tx popen//id=ray --tx popen//id=others//nice=5 \
	--tx popen//id=interpreter//nice=5//env:TRITON_INTERPRET=1//env:OMP_NUM_THREADS=1

# The lint runs in parallel with the tests; make reports a failure of either after both have ended.
test: $(STAMP)
	@$(MAKE) --no-print-directory --jobs lint pytest

pytest: $(STAMP)
	$(BIN)/python -m pytest $(TEST_PROCESSES) --dist loadscope --no-loadscope-reorder $(ARGS)

# Tests that `make test` leaves out: all random worlds, and slow tests.
test-deep: $(STAMP)
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal --deep -m 'random_worlds or deep' $(ARGS)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/model/interpreted --numprocesses 2 --deep -m deep $(ARGS)

# The site of docs/, in site/. A link that leads nowhere fails the build.
site: $(BIN)/zensical
	$(BIN)/zensical build --strict --clean

$(BIN)/zensical: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt zensical

bench: $(STAMP)
	$(BIN)/python -m bench $(ARGS)

# For machines without a network: uses the installed Python without a .venv.
gpu-check:
	PYTHONPATH=. $(PYTHON) -m bench.gpu_check $(ARGS)
