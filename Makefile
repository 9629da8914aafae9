# On a machine with only Python and make:  make demo | make test | make check
#
#   TORCH     what pip installs as torch       make demo TORCH="torch==2.11.0"
#   PIP_ARGS  more arguments for pip           make demo PIP_ARGS="--index-url URL"
#   SEED, ARGS  passed to the demo             make demo SEED=3 ARGS=--from-scratch

PYTHON   ?= python3
VENV     ?= .venv
TORCH    ?= torch==2.13.0
PIP_ARGS ?=
SEED     ?= 0
ARGS     ?=
BIN      := $(VENV)/bin
# most modules of what is installed are never imported: Python compiles the others when it first needs them, and keeps that
PIP      := $(BIN)/pip install --quiet --no-compile $(PIP_ARGS)
export PYTHONDONTWRITEBYTECODE =
WHEEL_VENV := build/wheel-venv

.DEFAULT_GOAL := help
.PHONY: help demo test test-learn test-gpu test-kernels check format docs wheel warm-start clean bench-text bench-gpu bench-control bench-sandbox bench-ui pictures

help: ## show this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 14

$(VENV)/core: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Panoply needs Python 3.11 or newer: make PYTHON=python3.12 …"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$(TORCH)" -e .
	@touch $@

$(VENV)/dev: $(VENV)/core
	$(PIP) "panoply-rl[dev]"
	@touch $@

demo: $(VENV)/core ## set up, then teach a tiny model arithmetic with GRPO (about a minute)
	$(BIN)/panoply train grpo --world chain --seed $(SEED) $(ARGS)
	@echo && echo "The command panoply is in $(BIN): . $(BIN)/activate puts it on your path."

test: $(VENV)/dev wheel ## set up and run the whole test suite
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m "not learn"

test-learn: $(VENV)/dev ## the learning tests: methods reach their mark on several seeds (minutes)
	$(BIN)/pytest -m learn

test-gpu: $(VENV)/dev ## what needs a GPU: kernels, graphs, and the first steps of every method beside the processor's (minutes)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 8 --dist worksteal -m gpu

KERNELS_VENV := $(VENV)/kernels

test-kernels: ## the GPU's kernels in Triton's interpreter, and compiled, on a machine without a GPU (minutes, and a download)
	$(PYTHON) -m venv $(KERNELS_VENV)
	$(KERNELS_VENV)/bin/pip install --quiet $(PIP_ARGS) "$(TORCH)" -e . triton==3.6.0 "numpy<2.3" "transformers>=5" pytest
	TRITON_INTERPRET=1 PYTHONPATH=tests $(KERNELS_VENV)/bin/python -m pytest -q -W ignore tests/kernels/interpreted.py tests/kernels/interpreted_paths.py
	PYTHONPATH=tests $(KERNELS_VENV)/bin/python -m pytest -q -W ignore tests/kernels/compiled.py

check: $(VENV)/dev ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/dev ## apply the formatter
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/dev ## write docs/api.md and docs/methods anew from the code and from results/claims
	$(BIN)/python -m panoply.index
	$(BIN)/python -m panoply.report.reference > docs/api.md
	$(BIN)/python -m panoply.evidence.catalogue
	$(BIN)/python -m panoply.evidence.pairs

wheel: $(VENV)/dev ## build the wheel, install it into an empty environment, try it
	rm -rf build dist
	$(BIN)/python -m build --wheel --outdir dist .  > /dev/null
	$(BIN)/python -m venv $(WHEEL_VENV)
	$(BIN)/python .ci/borrow.py panoply-rl $$($(WHEEL_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
	$(WHEEL_VENV)/bin/pip install --quiet --no-compile --no-index dist/*.whl
	cd build && ../$(WHEEL_VENV)/bin/panoply train grpo --world chain --steps 2 --quiet --run smoke
	cd build && ../$(WHEEL_VENV)/bin/panoply sample smoke "3+4*2+1*5+6*2+7=" --temperature 0
	cd build && ../$(WHEEL_VENV)/bin/panoply report smoke -o smoke.html
	rm -rf build

warm-start: $(VENV)/core ## remake the shipped warm start of chain by imitation (about two minutes)
	$(BIN)/panoply train sft --world chain --model fresh --threads 1 --run runs/chain-start
	rm -rf panoply/assets/chain-start
	$(BIN)/panoply export runs/chain-start panoply/assets/chain-start --which last

bench-text: $(VENV)/dev ## GRPO on text beside TRL's, equal work, on this machine's CPU (minutes; nothing else should run), then docs/performance.md
	HF_HUB_OFFLINE=1 $(BIN)/python benchmarks/text.py --again
	$(BIN)/python -m benchmarks.gpu table

bench-control: $(VENV)/dev ## control beside Stable-Baselines3 and d3rlpy, equal work, on this machine's CPU (minutes; nothing else should run), then docs/performance.md
	$(PIP) "panoply-rl[bench]"
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.control
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.control_worlds
	$(BIN)/python -m benchmarks.gpu table

bench-gpu: $(VENV)/dev ## the GPU benchmark, cell by cell, then docs/performance.md (skipped without CUDA)
	$(BIN)/python -m benchmarks.gpu && $(BIN)/python -m benchmarks.gpu table

bench-sandbox: $(VENV)/dev ## programs a second in every sandbox that starts here (a minute; nothing else should run)
	$(BIN)/python benchmarks/sandbox.py

bench-ui: $(VENV)/dev ## the page with 1,000 runs and long episodes in Chromium (a minute; nothing else should run)
	$(BIN)/python benchmarks/ui.py

pictures: $(VENV)/dev ## take the pictures of docs/ui.md anew (minutes)
	$(BIN)/python benchmarks/ui_pictures.py

clean: ## remove what was built, not the runs
	rm -rf build dist $(VENV) *.egg-info .mypy_cache .ruff_cache
