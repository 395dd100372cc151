# `make help` lists the targets. Each one installs what it needs into .venv, once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test lint types docs bench bench-smoke clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.stamp-demo ## stage a real nested dataset and train on it (DEMO_ARGS)
	$(BIN)/pinstage demo $(DEMO_ARGS)

test: $(VENV)/.stamp-test ## run the tests (PYTEST_ARGS)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.stamp-lint ## check style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.stamp-types ## check types
	$(BIN)/mypy

docs: $(VENV)/.stamp-docs ## build the docs into site/
	$(BIN)/mkdocs build --strict

bench: $(VENV)/.stamp-bench ## compare with every rival, which needs a GPU (BENCH_ARGS)
	$(BIN)/pinstage bench --out benchmarks/results/staging.json --plot docs/scaling.png $(BENCH_ARGS)

bench-smoke: $(VENV)/.stamp-bench ## run the benchmarks in small, without a GPU (BENCH_ARGS)
	$(BIN)/pinstage bench --smoke $(BENCH_ARGS)
	$(BIN)/python benchmarks/loader.py --smoke
	$(BIN)/python benchmarks/to_host.py --smoke

clean: ## remove what was built; .venv stays
	rm -rf build dist site out .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -prune -exec rm -rf {} +

# One stamp for each extra of pyproject.toml: a second call installs nothing.
$(VENV)/.stamp-%: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$*]'
	@touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
