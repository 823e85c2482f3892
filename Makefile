# Targets that need .venv create it, and update it after a change of pyproject.toml or constraints.txt. `make serve` needs
# the service alone; the others add the tools of developers.
.PHONY: help venv serve test pytest test-deep lint site bench gpu-check
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev

# Variables of `make serve`: address, model and replicas. ARGS takes options of `headway serve`, and fields as key=value.
HOST ?= 127.0.0.1
PORT ?= 8000
MODEL ?=
DTYPE ?=
REPLICAS ?=
PROFILE ?= auto
ARGS ?=

help:  ## list the targets, which is what `make` alone does
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo 'Variables of make serve: HOST PORT MODEL DTYPE REPLICAS PROFILE ARGS; of make pytest, test-deep and bench: ARGS'

venv: $(DEV_STAMP)  ## install into .venv

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) deploy/make_venv.py $(VENV)
	@touch $@

$(DEV_STAMP): pyproject.toml constraints.txt
	@$(PYTHON) deploy/make_venv.py $(VENV) dev
	@touch $(STAMP) $@

# Runs in the foreground; SIGTERM or Ctrl-C stops everything that it started.
serve: $(STAMP)  ## serve a model here until Ctrl-C
	@exec $(BIN)/python -m serve_app.cli.main serve --host $(HOST) --port $(PORT) --profile $(PROFILE) \
		$(if $(MODEL),--model '$(MODEL)') $(if $(DTYPE),--dtype '$(DTYPE)') $(if $(REPLICAS),--num-replicas '$(REPLICAS)') \
		$(ARGS)

lint: $(DEV_STAMP)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Three processes share the tests (tests/conftest.py). The tests that start Ray take longest and go first.
TEST_PROCESSES := --tx popen//id=ray --tx popen//id=others//nice=5 \
	--tx popen//id=interpreter//nice=5//env:TRITON_INTERPRET=1//env:OMP_NUM_THREADS=1

# Processes that tests start would else compile the modules each time.
test pytest test-deep: export PYTHONDONTWRITEBYTECODE =

# The lint runs in parallel with the tests; make reports a failure of either after both have ended.
test: $(DEV_STAMP)  ## lint and all tests
	@$(MAKE) --no-print-directory --jobs lint pytest

pytest: $(DEV_STAMP)  ## the tests alone; ARGS names some
	$(BIN)/python -m pytest $(TEST_PROCESSES) --dist loadscope --no-loadscope-reorder $(ARGS)

# Tests that `make test` leaves out: all random worlds, all cases of sampled tests, rotated modules, and slow tests.
test-deep: $(DEV_STAMP)  ## all random worlds, all cases, slow tests
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal --deep -m 'random_worlds or rotated or sampled or deep' $(ARGS)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/model/interpreted --numprocesses 2 --deep -m 'rotated or sampled or deep' $(ARGS)

# A link that leads nowhere fails the build.
site: $(BIN)/zensical  ## the site of docs/, in site/
	$(BIN)/zensical build --strict --clean

$(BIN)/zensical: $(DEV_STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt zensical

bench: $(DEV_STAMP)  ## measurements; ARGS names one
	$(BIN)/python -m bench $(ARGS)

# For machines without a network: uses the installed Python without a .venv.
gpu-check:  ## checks and measurements on a GPU, without .venv
	PYTHONPATH=. $(PYTHON) -m bench.gpu_check $(ARGS)
