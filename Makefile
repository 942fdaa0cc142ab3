# `make demo`, `make live` and `make test`. Each sets up its own virtual environment in .venv first.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
CPU_INDEX := https://download.pytorch.org/whl/cpu

.PHONY: demo live pictures test test-compiled thorough lint types audit docs notebooks clean

demo: .venv/.installed
	$(BIN)/arcuate demo

live: .venv/.installed-live runs/demo/recipe.yaml
	$(BIN)/arcuate live runs/demo

runs/demo/recipe.yaml: | .venv/.installed
	$(BIN)/arcuate demo

test: export OMP_NUM_THREADS = 1
test: lint
	$(MAKE) --no-print-directory -j 2 types test-compiled
	$(BIN)/python -m pytest -n 3 --dist worksteal $(COMPILED:%=--ignore=%)

# Tests that compile nearly all of the search. They run first and in one process, while mypy occupies the other core;
# the processes after them find the compiled functions in Numba's cache.
COMPILED := $(wildcard tests/decoding/*_search.py tests/decoding/test_prefix_beam.py tests/decoding/test_delayed_fusion.py)
test-compiled: .venv/.installed-dev
	$(BIN)/python -m pytest $(COMPILED)

# the same with more random examples and more moments to be killed at
thorough: export ARCUATE_TESTS = thorough
thorough: test

lint: .venv/.installed-dev
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks

types: .venv/.installed-dev
	$(BIN)/mypy

# licences and known vulnerabilities of the dependencies; skipped with the reason where no database can be reached
audit: .venv/.installed-dev
	$(BIN)/python .ci/audit.py

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "arcuate needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv

# Linux wheels of PyTorch on the default index bring several gigabytes of CUDA libraries. Where no NVIDIA GPU is present,
# the CPU build is installed first; if its index cannot be reached, the default one is used.
.venv/.torch: constraints.txt | .venv/bin/python
	if [ "$$(uname -s)" = Linux ] && ! nvidia-smi -L >/dev/null 2>&1; then \
	  $(PIP) --retries 0 --timeout 15 --index-url $(CPU_INDEX) torch || \
	  echo "$(CPU_INDEX) cannot be reached; PyTorch comes from the default index"; \
	fi
	touch $@

.venv/.installed: pyproject.toml constraints.txt .venv/.torch | .venv/bin/python
	$(PIP) --editable .
	touch $@

.venv/.installed-live: pyproject.toml constraints.txt .venv/.torch | .venv/bin/python
	$(PIP) --editable '.[live]'
	touch $@

.venv/.installed-dev: pyproject.toml constraints.txt .venv/.torch | .venv/bin/python
	$(PIP) --editable '.[dev]'
	touch $@ .venv/.installed

# the documentation site, in site/; works offline
docs: .venv/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# notebooks/*.ipynb from the .py files in jupytext's percent format
notebooks: .venv/.installed-dev
	$(BIN)/jupytext --to ipynb notebooks/*.py

# every picture in docs/images; look at each before committing it
pictures: .venv/.installed-dev runs/demo/recipe.yaml
	$(BIN)/python benchmarks/pictures.py --run runs/demo --out docs/images

clean:
	rm -rf .venv site runs/demo data/demo .mypy_cache .ruff_cache .pytest_cache
