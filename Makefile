# Every target is a word. Each sets up what it needs in .venv first; a second run is quick.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

SGLANG := .venv-sglang
TRACKERS := .venv-trackers
RELEASE := .venv-release
# Parallel test processes; each computes on one thread, so that they do not compete for cores.
WORKERS ?= 2
# Extended tests also wait: for servers, for deadlines, for runs in other processes.
EXTENDED_WORKERS ?= 3
# Tests start hundreds of processes; without byte code on disk each would compile this package again.
export PYTHONDONTWRITEBYTECODE :=
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

# Test files that write what is generated and checked in.
GENERATED = $(shell grep -rlE 'def test_\w*generated.*regenerate: bool' --include='test_*.py' tests)

# Tests that need no package beyond the development tools.
PLAIN := not sglang and not megatron and not ray and not trackers and not release

.PHONY: help demo test test-extended test-slow test-all test-sglang test-megatron test-ray test-environments test-trackers
.PHONY: test-release check format bench docs regenerate clean

help:
	@echo "make demo            set up, then train a small model on this machine (about three minutes)"
	@echo "make test            set up, then run the default tests (8 minutes at most on two cores)"
	@echo "make test-extended   every model family, kernel shape, kill point and all hypothesis examples"
	@echo "make test-slow       tests that take minutes each"
	@echo "make test-all        the three above"
	@echo "make test-sglang     install stock SGLang in its own environment (2 GB), run the HTTP API tests against it"
	@echo "make test-megatron   add Megatron-Core, then run the tests of its backend"
	@echo "make test-environments   add the suites of environments and lm-eval, then run the tests on them"
	@echo "make test-trackers   install wandb, MLflow, Trackio and OpenTelemetry in an environment of their own, run their tests"
	@echo "make test-release    build the package, install it on each Python that is there, check images and workflows"
	@echo "make test-ray        add Ray, then run on clusters of several raylets on this machine"
	@echo "make check           formatting, lint, types, architecture tests"
	@echo "make bench           measured ratios: engine and trainer against transformers"
	@echo "make format          rewrite the code as the checks want it"
	@echo "make docs            build the documentation site into site/; a broken link fails"
	@echo "make regenerate      rewrite the checked-in lists and generated pages (a minute; ARGS=--remeasure: errors of all models)"
	@echo "make clean           remove what the other targets made (runs/ stays)"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Miles needs Python 3.11 or newer; $$($(PYTHON) --version) is what '$(PYTHON)' is. Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Setting up .venv (a few minutes the first time) ..."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Setting up .venv (a few minutes the first time) ..."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(VENV)/.installed $@

demo: $(VENV)/.installed
	$(BIN)/miles demo $(ARGS)

test: $(VENV)/.installed-dev
	$(PYTEST) -n $(WORKERS) --dist worksteal --cpu-limit 3 -m "not extended and not slow and $(PLAIN)" $(ARGS)

test-extended: $(VENV)/.installed-dev
	MILES_TEST_TIER=extended $(PYTEST) -n $(EXTENDED_WORKERS) --dist worksteal -m "(extended or property) and not slow and $(PLAIN)" $(ARGS)

test-slow: $(VENV)/.installed-dev
	MILES_TEST_TIER=extended $(BIN)/python -m pytest -m "slow and $(PLAIN)" $(ARGS)

test-all: test test-extended test-slow

$(SGLANG)/.installed: tests/server_api/sglang_requirements.txt
	@echo "Setting up $(SGLANG) (a few minutes the first time) ..."
	$(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check $$(grep '^torch==' $<)
	$(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	@touch $@

test-sglang: $(VENV)/.installed-dev $(SGLANG)/.installed
	$(BIN)/python -m pytest -m sglang $(ARGS)

$(VENV)/.installed-megatron: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,megatron]'
	@touch $@

test-megatron: $(VENV)/.installed-megatron
	$(BIN)/python -m pytest -m megatron $(ARGS)

$(VENV)/.installed-ray: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,ray]' 'ray[default]'
	@touch $@

test-ray: $(VENV)/.installed-ray
	$(PYTEST) -m ray $(ARGS)

$(VENV)/.installed-environments: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,environments,lm-eval,swebench]'
	@touch $@

test-environments: $(VENV)/.installed-environments
	$(BIN)/python -m pytest tests/rollout/tools $(ARGS)

# Trackio wants Pillow < 13 and MLflow's server pyarrow < 26, so the pins of these two do not hold there.
$(TRACKERS)/.installed: pyproject.toml constraints.txt
	@echo "Setting up $(TRACKERS) (a few minutes the first time) ..."
	$(PYTHON) -m venv $(TRACKERS)
	grep -vE '^(pillow|pyarrow)==' constraints.txt > $(TRACKERS)/constraints.txt
	$(TRACKERS)/bin/python -m pip install --quiet --disable-pip-version-check -c $(TRACKERS)/constraints.txt \
		-e '.[dev,trackers]' mlflow
	@touch $@

test-trackers: $(TRACKERS)/.installed
	OMP_NUM_THREADS=1 $(TRACKERS)/bin/python -m pytest -m trackers $(ARGS)

$(RELEASE)/.installed: pyproject.toml constraints.txt
	@echo "Setting up $(RELEASE) (a few minutes the first time) ..."
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,release]'
	@touch $@

test-release: $(RELEASE)/.installed
	PATH="$(CURDIR)/$(RELEASE)/bin:$$PATH" $(RELEASE)/bin/python -m pytest -m release $(ARGS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright
	$(BIN)/python -m pytest tests/test_architecture.py

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/bench_engine.py
	$(BIN)/python benchmarks/bench_trainer.py

# The extra `docs` without the project: the site is built from files, and needs no torch.
$(VENV)/.installed-docs: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt mkdocs-material
	@touch $@

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

regenerate: $(VENV)/.installed-dev
	$(PYTEST) -q $(GENERATED) -k generated --regenerate $(ARGS)

clean:
	rm -rf $(VENV) $(SGLANG) $(TRACKERS) $(RELEASE) build dist site src/*.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
