# Each target sets up its own virtual environment in .venv first.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
CPU_INDEX := https://download.pytorch.org/whl/cpu

.PHONY: demo live test thorough docs notebooks audit clean

demo: .venv/.installed
	$(BIN)/arcuate demo

live: .venv/.installed-live runs/demo/recipe.yaml
	$(BIN)/arcuate live runs/demo

runs/demo/recipe.yaml: | .venv/.installed
	$(BIN)/arcuate demo

# lint, types and the tests that take seconds; mypy beside the tests
test: export OMP_NUM_THREADS = 1
test: .venv/.installed-dev
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy & types=$$!; $(BIN)/python -m pytest -n 2 --dist worksteal; tests=$$?; wait $$types && exit $$tests

# what takes longer, and the laws and damaged files with ten times as many cases
thorough: export OMP_NUM_THREADS = 1
thorough: .venv/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist worksteal -m thorough --cases 200
	$(BIN)/python -m pytest -n 2 --dist worksteal --cases 200 tests/laws tests/fuzz

# known vulnerabilities and licences of the dependencies
audit: .venv/.installed-dev
	$(BIN)/pip-audit --local --skip-editable --progress-spinner off
	$(BIN)/pip-licenses --summary --order license

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "arcuate needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(PIP) --upgrade 'pip>=25.1' # the first that knows dependency groups

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
	$(PIP) --editable . --group dev
	touch $@ .venv/.installed

# the documentation site, in site/; works offline
docs: .venv/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# notebooks/*.ipynb from the .py files in jupytext's percent format
notebooks: .venv/.installed-dev
	$(BIN)/jupytext --to ipynb notebooks/*.py

clean:
	rm -rf .venv site runs/demo data/demo .mypy_cache .ruff_cache .pytest_cache
