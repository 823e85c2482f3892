# Every target makes .venv when it needs one, and again when pyproject.toml or constraints.txt change.
.PHONY: venv serve test pytest test-deep lint bench gpu-check
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# make serve: where to listen and what to serve. ARGS takes any field of docs/configuration.md as key=value.
HOST ?= 127.0.0.1
PORT ?= 8000
MODEL ?=
DTYPE ?=
REPLICAS ?=
PROFILE ?= default
ARGS ?=

venv: $(STAMP)

# torch comes first and alone: asked for by name and exact version the CPU wheel is taken where one is
# offered; a looser request may draw in gigabytes of CUDA packages.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# In the foreground; SIGTERM or Ctrl-C stops everything that it started.
serve: $(STAMP)
	@exec $(BIN)/python -m serve_app.cli.serve --host $(HOST) --port $(PORT) --profile $(PROFILE) -- \
		$(if $(MODEL),'model=$(MODEL)') $(if $(DTYPE),'dtype=$(DTYPE)') $(if $(REPLICAS),'num_replicas=$(REPLICAS)') $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Three processes share the tests (tests/conftest.py). What starts Ray goes before all else: it takes longest.
TEST_PROCESSES := --tx popen//id=ray --tx popen//id=others//nice=5 \
	--tx popen//id=interpreter//nice=5//env:TRITON_INTERPRET=1//env:OMP_NUM_THREADS=1

# The lint runs beside the tests; both end before either's failure is told.
test: $(STAMP)
	@$(MAKE) --no-print-directory --jobs lint pytest

pytest: $(STAMP)
	$(BIN)/python -m pytest $(TEST_PROCESSES) --dist loadscope --no-loadscope-reorder $(ARGS)

# What `make test` leaves out: all random worlds, and what is slow.
test-deep: $(STAMP)
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal --deep -m 'random_worlds or deep' $(ARGS)

bench: $(STAMP)
	$(BIN)/python -m bench $(ARGS)

# For machines without a network: uses the Python that is there, as it is.
gpu-check:
	PYTHONPATH=. $(PYTHON) -m bench.gpu_check $(ARGS)
