# Every target is a word. Each sets up what it needs in .venv first; a second run is quick.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help demo test test-slow check format bench docs clean

help:
	@echo "make demo    set up, then watch a model learn on this machine (about three minutes)"
	@echo "make test    set up, then run the test suite"
	@echo "make check   formatting, lint, types, import rules, house rules"
	@echo "make bench   measured ratios: engine and trainer against transformers"
	@echo "make format  rewrite the code as the checks want it"
	@echo "make clean   remove what the other targets made (runs/ is yours and stays)"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Miles needs Python 3.11 or newer; $$($(PYTHON) --version) is what '$(PYTHON)' is. Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Setting up .venv (a few minutes the first time) ..."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(VENV)/.installed
	$(BIN)/miles demo $(ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-slow: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m slow $(ARGS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright
	$(BIN)/python -m pytest tests/test_house.py

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/engine.py
	$(BIN)/python benchmarks/trainer.py

docs: $(VENV)/.installed-dev
	$(BIN)/python -m pytest tests -k generated --regenerate

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
