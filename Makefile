# make setup: a virtual environment and the install;  make demo: the main job and its report;  make docs: site/index.html;
# make quick: a cross-section of the tests in a few minutes;  make test: all tests but those that take minutes;
# make chaos MINUTES=60: these, then kills (SuperNodes and Ray too), damaged files, mutated inputs, malicious sites, and every method inside every part;
# make mutants: plants faults one by one, each of which some test must notice; minutes each;
# make dist: a wheel and an sdist in dist/
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Three workers on two cores: much of the time is waiting for processes, Ray and Flower.
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadgroup --no-loadscope-reorder

# Every method on the rows engine, and whatever else needs no Ray, no Flower, no browser and no minute.
QUICK := project/test_architecture runs/test_config_file flat/test_layout flat/test_population common/test_randomness \
         algorithms/test_fedavg algorithms/test_fedmr algorithms/test_global_methods algorithms/test_global_invariants \
         parts/test_stages rounds/test_federation rounds/test_evaluation rounds/test_checkpoint state/test_store \
         report/test_tables cli/test_cli cli/test_one_line_errors data/test_partitions data/test_own secure/test_faults

MINUTES ?= 60

# The tests start hundreds of programs: without bytecode each would compile the package anew, and each worker all tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup setup-dev demo quick test chaos mutants lint docs dist clean

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

quick: setup-dev
	$(PYTEST) $(QUICK:%=tests/%.py)

test: setup-dev
	$(PYTEST)

chaos: setup-dev
	$(PYTEST) -m minutes
	$(BIN)/python tests/chaos/harness.py --minutes $(MINUTES)
	$(BIN)/python tests/seams/harness.py --minutes $(MINUTES)

mutants: setup-dev
	$(BIN)/python tests/mutants/harness.py

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: setup-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: setup-dev
	$(BIN)/hatchling build

clean:
	rm -rf $(VENV) runs dist build site .mypy_cache .ruff_cache .pytest_cache
