# What a newcomer runs: `make demo` and `make test`. Both make .venv with all that they need.
PYTHON ?= python3
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint types bench clean

demo: $(VENV)/.demo
	$(BIN)/python examples/embed_paragraphs.py

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

types: $(VENV)/.dev
	$(BIN)/mypy

bench: $(VENV)/.demo
	$(BIN)/python benchmarks/cpu_attention.py

$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/.torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[demo]'
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/.torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[demo,dev]'
	touch $@

# torch first and by its exact version: what the others ask for is then there already
$(VENV)/.torch: constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "nt_attention needs Python 3.11 or later; run make PYTHON=python3.12, say.")'
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $$(grep '^torch==' constraints.txt)
	touch $@

clean:
	rm -rf $(VENV) demo-output
