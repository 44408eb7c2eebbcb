# Every command here sets itself up in .venv; it needs make and Python 3.11 or newer.
#   make demo [ARGS="..."]    GRPO on a toy task, with and without prefix sharing
#   make test [ARGS="..."]    lint, types, tests without the slow ones; `make test-all` has those too
#   make lint | types | clean
# TORCH is installed first and alone, so that nothing after it pulls in another build: a requirement, a wheel, or pip options
# with them (make test TORCH=torch==2.11.0). Another TORCH or a changed pyproject.toml installs anew, nothing else does.

PYTHON ?= python3
TORCH ?= torch==2.13.0
ARGS ?=
# Tests run side by side, a file on one worker, a thread each; more workers than cores would starve those that spawn ranks.
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP := $(VENV)/.installed-$(firstword $(shell printf '%s' '$(TORCH)' | cksum))

.DELETE_ON_ERROR:
.PHONY: demo test test-all lint types install clean

demo: $(STAMP)
	$(BIN)/python examples/grpo_trl.py $(ARGS)

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile $(ARGS)

test-all: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile -m "" $(ARGS)

lint: $(STAMP) types
	$(BIN)/ruff check .

# An unpacked install, because `transforms/` has its real name only there. `build` goes first: setuptools would ship stale files.
types: $(STAMP)
	rm -rf build
	$(PIP) install --quiet --no-deps --no-build-isolation --target build/stage .
	cd build/stage && ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p augtree_fx

install: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(f"Python 3.11 or newer is needed, got {v[0]}.{v[1]}; use make PYTHON=python3.11" if v < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	rm -f $(VENV)/.installed-*
	$(PIP) install $(TORCH)
	$(PIP) install -e '.[trl,test]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
