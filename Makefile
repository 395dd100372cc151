# `make help` lists the targets. Each target installs what it needs into .venv, once.

PYTHON ?= python3
# `make test TORCH=2.15.0` uses another torch, in its own environment; TORCH=newest the newest torch and numpy. pip
# installs CUDA with it, 5 GB.
TORCH ?=
VENV := .venv$(if $(TORCH),-torch-$(TORCH))
BIN := $(VENV)/bin
FRAMEWORKS := .venv-frameworks
CONSTRAINTS := $(if $(TORCH),$(VENV)/)constraints.txt
PIP_INSTALL := -m pip install $(if $(MAKE_TERMOUT),,--quiet) --disable-pip-version-check -c $(CONSTRAINTS)

# The project's files are in UTF-8, whatever the locale.
export PYTHONUTF8 := 1

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-frameworks sanitize wheels release lint types docs bench bench-smoke clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.stamp-demo ## stage a real nested dataset and train on it (DEMO_ARGS)
	$(BIN)/python examples/demo $(DEMO_ARGS)

test: $(VENV)/.stamp-test ## run the tests (PYTEST_ARGS)
	@echo "The tests take five to six minutes on two idle CPUs."
	$(BIN)/python -m pytest -n 2 --dist worksteal $(PYTEST_ARGS)

test-frameworks: $(FRAMEWORKS)/.stamp ## run the tests with the frameworks, in an environment of their own (PYTEST_ARGS)
	$(FRAMEWORKS)/bin/python -m pytest tests/frameworks $(PYTEST_ARGS)

sanitize: $(VENV)/.stamp-test ## run the extension under ASan, UBSan and TSan (PYTEST_ARGS)
	PYTHON=$(BIN)/python scripts/sanitize.sh $(PYTEST_ARGS)

wheels: $(VENV)/.stamp-wheels ## build wheels for x86_64 and aarch64 into dist/, and try one
	PYTHON=$(BIN)/python scripts/build_wheels.sh

release: ## build and check what is uploaded (REPOSITORY=https://... SITE=https://...)
	@test -n "$(REPOSITORY)" || { echo "make release REPOSITORY=https://...: the README's links need its address"; exit 2; }
	PINSTAGE_REPOSITORY=$(REPOSITORY) PINSTAGE_SITE=$(SITE) $(MAKE) wheels

lint: $(VENV)/.stamp-lint ## check style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(wildcard src/pinstage/_native/*.[ch] tests/native/*.c)

types: $(VENV)/.stamp-types ## check types
	$(BIN)/mypy
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(BIN)/python

docs: $(VENV)/.stamp-docs $(VENV)/.stamp-test ## check the words of the docs, build them into site/, run their code and the examples
	$(BIN)/python scripts/prose.py
	$(BIN)/mkdocs build --strict
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/pages tests/examples $(PYTEST_ARGS)

bench: $(VENV)/.stamp-bench ## compare with every rival, which needs a GPU (BENCH_ARGS)
	$(BIN)/python benchmarks/comparison --out benchmarks/results/staging.json --plot docs/scaling.png $(BENCH_ARGS)

bench-smoke: $(VENV)/.stamp-bench $(VENV)/.stamp-test ## run small benchmarks without a GPU, and their tests (PYTEST_ARGS)
	$(BIN)/python -m pytest -n 2 --dist worksteal tests/benchmarks $(PYTEST_ARGS)

clean: ## remove build outputs, but not .venv
	rm -rf build dist site out .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} +

# The extension is compiled again when one of these files has changed.
NATIVE := setup.py $(wildcard src/pinstage/_native/*.[ch])

# One stamp per dependency group of pyproject.toml: a second call installs nothing. An existing extension is removed first,
# since it may be outdated. pip supports groups since 25.1. The demo should start soon, so no bytecode is compiled.
$(VENV)/.stamp-%: pyproject.toml $(CONSTRAINTS) $(NATIVE) | $(BIN)/python
	@echo "Installing pinstage and its group $* into $(VENV), once. Most of it is torch: half a minute if pip has it in"
	@echo "its cache, else minutes: 200 MB without CUDA, 3 GB with it. A C compiler builds the extension in seconds."
	@rm -f src/pinstage/_native/*.so
	@$(BIN)/python $(PIP_INSTALL) --quiet --no-compile 'pip>=25.1'
	@$(BIN)/python $(PIP_INSTALL) $(if $(filter demo,$*),--no-compile) -e . --group $*
	@touch $@

# Of the dependencies of these, the tests need only torch and packages of the group; others are a torch with CUDA, cloud
# storage and an older numpy. The tests use torchvision's tv_tensors; its binary doesn't load with a torch without CUDA.
WITHOUT_DEPENDENCIES := torchrec fbgemm-gpu-cpu mosaicml-streaming

$(FRAMEWORKS)/.stamp: pyproject.toml constraints.txt $(NATIVE)
	@echo "Installing the frameworks into $(FRAMEWORKS), once: this takes two to ten minutes."
	$(PYTHON) -m venv $(FRAMEWORKS)
	rm -f src/pinstage/_native/*.so
	$(FRAMEWORKS)/bin/python $(PIP_INSTALL) --quiet 'pip>=25.1'
	$(FRAMEWORKS)/bin/python $(PIP_INSTALL) -e . --group frameworks
	$(FRAMEWORKS)/bin/python $(PIP_INSTALL) --no-deps $(WITHOUT_DEPENDENCIES)
	$(FRAMEWORKS)/bin/python $(PIP_INSTALL) --no-deps --upgrade --target $(FRAMEWORKS)/torchvision-source torchvision
	@touch $@

ifneq ($(TORCH),)
$(CONSTRAINTS): constraints.txt | $(BIN)/python
	sed '$(if $(filter newest,$(TORCH)),/^\(torch\|numpy\)==/d,s/^torch==.*/torch==$(TORCH)/)' constraints.txt > $@
endif

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
