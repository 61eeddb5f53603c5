# Everything here sets itself up: `make demo` on a fresh machine needs Python 3.10+ only.
# Set-up is repeated when pyproject.toml or constraints.txt changed.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --constraint constraints.txt --editable
# Stamps: what is installed in the environment. `dev` contains `demo`.
DEMO := $(VENV)/.installed-demo
DEV := $(VENV)/.installed-dev

.DEFAULT_GOAL := help
.PHONY: help demo bench test lint docs examples clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

demo: $(DEMO) ## run `meantime demo` (options: ARGS="--task mnist")
	$(BIN)/meantime demo $(ARGS)

bench: $(DEMO) ## run `meantime bench` (options: ARGS=...)
	$(BIN)/meantime bench $(ARGS)

test: $(DEV) ## run all tests, doctests and code blocks of the docs (options: ARGS="-k word")
	$(BIN)/python -m pytest $(ARGS)

lint: $(DEV) ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(DEV) ## build docs/_build/html; warnings are errors
	$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build/html

# Loopback only and one thread a process: several replicas share this machine.
examples: export MASTER_ADDR ?= 127.0.0.1
examples: export GLOO_SOCKET_IFNAME ?= lo
examples: export OMP_NUM_THREADS ?= 1
examples: export MPLBACKEND ?= Agg
examples: $(DEV) ## run every file of examples/
	@set -e; for file in $(sort $(wildcard examples/*.py)); do \
		case $$file in \
			*/classic_script.py | */accelerate_script.py) ranks=2 ;; \
			*/fsdp2_hybrid.py) ranks=4 ;; \
			*) ranks= ;; \
		esac; \
		launch=$${ranks:+-m torch.distributed.run --standalone --local-addr 127.0.0.1 \
			--nproc-per-node $$ranks}; \
		echo "== $$file"; \
		$(BIN)/python $$launch $$file; \
	done

clean: ## remove caches, builds and demo outputs; the environment stays
	rm -rf build dist docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis meantime-demo* meantime-bench*
	find src tests property_tests examples docs -name __pycache__ -prune -exec rm -rf {} +

$(DEMO): pyproject.toml constraints.txt | $(BIN)/pip
	$(INSTALL) '.[cli,demo]'
	@touch $@

$(DEV): pyproject.toml constraints.txt | $(BIN)/pip
	$(INSTALL) '.[dev]'
	@touch $(DEMO) $@

# pip comes last into an environment: one that has it is complete.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "meantime needs Python 3.10 or newer, but $(PYTHON) is" \
			"'$$($(PYTHON) --version 2>&1)'. Name another: make PYTHON=python3.12 ..." >&2; \
		exit 1; }
	$(PYTHON) -m venv $(VENV)
