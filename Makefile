# What a newcomer runs: `make demo` and `make test`. Both make .venv with all that they need.
# `make test TORCH=2.11.0 TRANSFORMERS=5.17.0` tests other versions, in an environment of their own.
PYTHON ?= python3
JOBS ?= 2
PINNED_TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
PINNED_TRANSFORMERS := $(shell sed -n 's/^transformers==//p' constraints.txt)
TORCH ?= $(PINNED_TORCH)
TRANSFORMERS ?= $(PINNED_TRANSFORMERS)
PINNED := $(and $(filter $(PINNED_TORCH),$(TORCH)),$(filter $(PINNED_TRANSFORMERS),$(TRANSFORMERS)))
VENV := .venv$(if $(PINNED),,-torch$(TORCH)-transformers$(TRANSFORMERS))
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --expect torch==$(TORCH) --expect transformers==$(TRANSFORMERS)

.PHONY: demo test test-all test-ci gpu soak docs site code-blocks lint types bench wheel clean

demo: $(VENV)/.demo
	$(BIN)/python examples/embed_paragraphs.py --every 6

# all features, about ten minutes on two cores; tests of DeepSpeed and lm-evaluation-harness are skipped, unless `pip install`
# has added deepspeed and lm-eval to .venv
test: $(VENV)/.dev
	$(PYTEST) --dist worksteal -m "not sweep"

# the same with a fixed eighth of the sweeps (random draws, products of options); `pytest --whole-sweeps` runs all
test-all: $(VENV)/.dev
	$(PYTEST) --dist worksteal
	$(MAKE) soak

# of the sweeps only those of tests that have no other cases; a submission must pass this and the soak
test-ci: $(VENV)/.dev
	$(PYTEST) --dist worksteal --least-sweeps --durations=40

# what needs a GPU, or runs on it where there is one; it ends with a table of passed and failed tests of each backend
gpu: $(VENV)/.dev
	$(BIN)/python -m pytest -m gpu

# a minute of random calls of the CPU's backend, in one process
soak: $(VENV)/.dev
	$(BIN)/python tests/helpers/soak.py --device cpu --minutes 1

docs: site code-blocks

# the site, with warnings as errors (with --quiet, mkdocs does not count them)
site: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# every code block of the README, the pages and the docstrings
code-blocks: $(VENV)/.dev
	$(PYTEST) --dist loadfile README.md docs nt_attention

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

# of the package, and of a user's program
types: $(VENV)/.dev
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(VENV)/.demo
	$(BIN)/python benchmarks/cpu_attention.py

# dist/*.whl, and the README's code in an environment that has what it needs and nothing else
wheel: $(VENV)/.dev
	rm -rf dist && $(BIN)/python -m build --outdir dist
	$(BIN)/python tools/try_wheel.py dist/*.whl

$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/.torch
	$(BIN)/pip install --quiet --constraint $(VENV)/constraints.txt --editable '.[demo]'
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/.torch
	$(BIN)/pip install --quiet --constraint $(VENV)/constraints.txt --editable '.[demo,dev]'
	touch $@

# Torch is installed first and by its exact version, so that no other package installs another one. With other versions
# than the pinned ones, only packages that depend on neither stay pinned. The interpreter of Triton 3.6, which torch 2.11
# comes with, needs numpy before 2.4. Builds of torch for GPUs bring their own Triton, so the pinned one is for the CPU.
$(VENV)/.torch: constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "nt_attention needs Python 3.11 or later: pass PYTHON=python3.12, for example.")'
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(if $(PINNED),cat,grep -v -E '^(torch|transformers|triton|huggingface_hub|tokenizers|safetensors|numpy)==') constraints.txt > $(VENV)/constraints.txt
	$(if $(PINNED),,printf 'torch==$(TORCH)\ntransformers==$(TRANSFORMERS)\nnumpy<2.4\n' >> $(VENV)/constraints.txt)
	$(BIN)/pip install --quiet torch==$(TORCH)
	if $(BIN)/pip show --quiet triton 2> /dev/null; then sed -i.all '/^triton==/d' $(VENV)/constraints.txt; fi
	touch $@

clean:
	rm -rf .venv .venv-torch* demo-output dist site
