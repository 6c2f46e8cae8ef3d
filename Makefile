# make setup: a virtual environment and the install;  make demo: the main job and its report;  make test: every test;
# make docs: the documentation, site/index.html
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: setup setup-dev demo test lint docs clean

setup: $(VENV)/.installed
setup-dev: $(VENV)/.installed-dev

# Stamps make a second call quick: pip runs again only when what it reads has changed.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: setup
	$(BIN)/fedloom compare examples/digits.toml

test: setup-dev
	$(BIN)/python -m pytest -n 2

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: setup-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) runs dist build site .mypy_cache .ruff_cache .pytest_cache
