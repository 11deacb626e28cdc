# Everything a developer types. The environment is rebuilt only when the lock files change (tools/bootstrap.sh).
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
QUICKSTART_DIR ?= runs/quickstart
CHAIN_DIR ?= runs/quickstart_chain
TOOLS_DIR ?= runs/quickstart_tools
VISION_DIR ?= runs/quickstart_vision
PYTEST_ARGS ?=
NPU_PYTEST_ARGS ?=
MINDSPEED ?=
FUZZ_EXAMPLES ?= 10000
BIN = $(abspath $(VENV))/bin
# Targets find the package of this clone, whether or not the environment has it installed.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
# Releases of torch_npu that test-npu has fetched; the contract tests read them where they are.
export MEGA_RL_TORCH_NPU_WHEELS = $(abspath $(VENV))/npu_emulation/wheels
ifdef PYTHON
export PYTHON
endif

.PHONY: help venv quickstart quickstart-chain quickstart-tools quickstart-vision test test-parts test-fast test-fast-packages test-fast-rest test-cpu test-npu test-unit test-distributed fuzz durations lint format types reference tensorboard clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

venv: ## build the environment in .venv (VENV=...), no work where it is up to date
	@tools/bootstrap.sh "$(VENV)" $(BOOTSTRAP_ARGS)

quickstart: venv ## train a tiny model with GRPO from nothing, under 10 minutes on 2 cores
	@VENV="$(abspath $(VENV))" QUICKSTART_DIR="$(QUICKSTART_DIR)" tools/quickstart.sh

quickstart-chain: venv ## SFT, a reward model and PPO; DPO; SFT with adapters, merged, GRPO: each from the one before
	@VENV="$(abspath $(VENV))" QUICKSTART_DIR="$(CHAIN_DIR)" tools/quickstart.sh chain

quickstart-tools: venv ## train a tiny model to ask a calculator for what it cannot compute, over several turns
	@VENV="$(abspath $(VENV))" QUICKSTART_DIR="$(TOOLS_DIR)" tools/quickstart.sh tools

quickstart-vision: venv ## train a tiny model from nothing to count drawn shapes: its vision tower, then GRPO
	@VENV="$(abspath $(VENV))" QUICKSTART_DIR="$(VISION_DIR)" tools/quickstart.sh vision

test: $(if $(PYTEST_ARGS),test-cpu,test-parts) ## the whole suite: test-npu, test-unit and test-distributed side by side; narrowed by PYTEST_ARGS, test-cpu alone

# Each part alone leaves a core idle for much of its time. Tests of two of them read the wheels.
test-parts: venv
	@tools/bootstrap.sh "$(VENV)" --npu-emulation
	@$(BIN)/python -m tests.launching.side_by_side test-npu test-unit test-distributed

test-fast: venv ## unit, contract and style tests without those marked slow, in two parts side by side: about 4 minutes on 2 cores
	@$(if $(PYTEST_ARGS),$(BIN)/python -m pytest tests/unit tests/contract tests/style -m "not slow" $(PYTEST_ARGS),$(BIN)/python -m tests.launching.side_by_side test-fast-packages test-fast-rest)

# The two parts of test-fast, of about the same length.
test-fast-packages:
	@$(BIN)/python -m pytest tests/unit --ignore=tests/unit/tools --ignore=tests/unit/config -m "not slow"

test-fast-rest:
	@$(BIN)/python -m pytest tests/unit/tools tests/unit/config tests/contract tests/style -m "not slow"

fuzz: venv ## random configurations, data files, model directories and checkpoints: 10,000 cases each (FUZZ_EXAMPLES=...)
	@MEGA_RL_FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) $(BIN)/python -m pytest $$(find tests/unit -name test_fuzz.py | sort) -o timeout=0 $(PYTEST_ARGS)

durations: ## the whole suite, part after part, and the ten tests of each part that took longest
	@$(MAKE) --no-print-directory test-npu test-unit test-distributed PYTEST_ARGS="--durations=10" NPU_PYTEST_ARGS="--durations=10"

test-cpu: venv ## all tests but those of device npu, in one process (PYTEST_ARGS=...)
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

test-unit: venv ## all tests but those of device npu and tests/distributed
	@$(BIN)/python -m pytest --ignore=tests/distributed $(PYTEST_ARGS)

test-distributed: venv ## tests/distributed: runs of several processes
	@$(BIN)/python -m pytest tests/distributed $(PYTEST_ARGS)

test-npu: venv ## the tests of device npu, with the torch_npu wheel on pretended devices, in a process of its own (MINDSPEED=its checkout)
	@tools/bootstrap.sh "$(VENV)" --npu-emulation
	@$(if $(MINDSPEED),test -d "$(MINDSPEED)/mindspeed" || { echo "error: MINDSPEED=$(MINDSPEED) holds no mindspeed/: name a checkout of MindSpeed" >&2; exit 2; })
	@MEGA_RL_NPU_EMULATION="$(abspath $(VENV))/npu_emulation" PYTHONPATH="$(if $(MINDSPEED),$(abspath $(MINDSPEED)):)$$PYTHONPATH" \
		$(BIN)/python -m tests.npu.emulation \
		$(BIN)/python -m pytest tests/npu $(NPU_PYTEST_ARGS)

lint: venv ## ruff: rules and format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: venv ## rewrite the code in the house format
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

types: venv ## mypy
	@$(BIN)/mypy

reference: venv ## write configs/README.md, docs/configuration.md and docs/metrics.md, also in Chinese, from recipes, schema and metrics
	@$(BIN)/python tools/recipes.py
	@$(BIN)/python tools/reference.py

tensorboard: venv ## the dashboard of every run under runs/
	@echo "the page with all charts: http://localhost:6006/#custom_scalars"
	@$(BIN)/tensorboard --logdir runs

clean: ## remove the environment and the caches, never runs/
	rm -rf .venv .venv.lock build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
