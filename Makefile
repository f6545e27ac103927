# SPDX-License-Identifier: Apache-2.0
#
# Every target sets up what it needs by itself; `make` alone lists them.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
JOBS ?= $(shell nproc)
export PYTHON JOBS
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)

# Folders are listed with their files, so that a removed file counts as a change.
PACKAGE_SOURCES := pyproject.toml $(shell find common/. proto/. master/. node/. store_client/. connector/. transfer_engine/. bench/. cython_ext/. \
	-name __pycache__ -prune -o -path cython_ext/./tests -prune -o -path cython_ext/./fuzz -prune -o -print)
# Each folder of tests is a suite of its own.
SUITES := $(sort $(patsubst tests/%/,%,$(dir $(wildcard tests/*/test_*.py))))
NATIVE_SOURCES := $(shell find cython_ext -name '*.h' -o -name '*.hpp' -o -name '*.cpp') $(wildcard tests/*/*.c)
SUITE := tools/suite.sh

# vLLM is large and has an environment of its own, of which each version has one: make test-vllm_engine VLLM=0.29.0
VLLM ?= 0.32.0
VLLM_VENV := .venv-vllm-$(VLLM)
VLLM_STAMPS := $(VLLM_VENV)/.stamps
# Where pip could not bring it, these suites run without and skip what needs it, with the reason.
VLLM_SUITES := $(filter connector connector_worker vllm_engine,$(SUITES))
VLLM_BIN = $$([[ -f $(VLLM_STAMPS)/missing ]] && echo $(BIN) || echo $(VLLM_VENV)/bin)

.PHONY: help
help:  ## List the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

.PHONY: bench
bench: $(STAMPS)/installed  ## Measure this host: the quick sweep of mooncake-bench (ARGS="transfer --help" for more)
	@$(BIN)/mooncake-bench $(ARGS)

.PHONY: test
test: native-test $(SUITES:%=test-%)  ## Run every test, native and Python

.PHONY: check
check: lint sanitize-address fuzz test  ## What CI runs: linters, the address sanitizer, fuzzers, every test

.PHONY: lint
lint: $(STAMPS)/lint $(STAMPS)/installed $(STAMPS)/test  ## Run the linters and the type checker
	@$(SUITE) lint tools/lint.sh $(BIN)

.PHONY: fix
fix: $(STAMPS)/lint  ## Repair what formatters and linters can repair
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(NATIVE_SOURCES)
	$(BIN)/codespell --write-changes

.PHONY: native-test
native-test: $(STAMPS)/system-test  ## Build and run the native unit tests
	@$(SUITE) native tools/native-tests.sh

.PHONY: sanitize
sanitize: sanitize-address sanitize-thread  ## Run the native unit tests under ASan with UBSan, then under TSan

.PHONY: sanitize-address sanitize-thread
sanitize-address sanitize-thread: sanitize-%: $(STAMPS)/system-test
	@$(SUITE) native-$* tools/native-tests.sh $*

.PHONY: fuzz
fuzz: $(STAMPS)/system-fuzz  ## Look for faults in every decoder for 20 seconds each (FUZZ_SECONDS=, FUZZ_RUNS=, TARGETS=)
	@$(SUITE) fuzz tools/fuzz.sh run $(TARGETS)

.PHONY: fuzz-minimise
fuzz-minimise: $(STAMPS)/system-fuzz  ## Take what fuzzing found into the corpora that are kept (TARGETS=)
	@tools/fuzz.sh minimise $(TARGETS)

# Processes that share the tests of a suite: JOBS, but one where all of them need the same machine.
WORKERS_rdma_lab := 0
.PHONY: $(SUITES:%=test-%)
$(SUITES:%=test-%): test-%: $(STAMPS)/installed $(STAMPS)/test
	@$(SUITE) $* $(if $(filter $*,$(VLLM_SUITES)),$(VLLM_BIN),$(BIN))/pytest -n $(or $(WORKERS_$*),$(JOBS)) tests/$* $(ARGS)
test-rdma_lab: $(STAMPS)/system-rdma-lab
$(VLLM_SUITES:%=test-%): $(VLLM_STAMPS)/installed

.PHONY: rdma-lab
rdma-lab: $(STAMPS)/installed $(STAMPS)/test $(STAMPS)/system-rdma-lab  ## A shell in an emulated machine with RDMA devices (ARGS="ibv_devinfo" runs that)
	@PYTHONPATH=tests $(BIN)/python -m rdma_lab $(ARGS)

.PHONY: demo
demo: $(VLLM_STAMPS)/installed  ## Two vLLM engines share a prefix through a pool: hit rate, time to the first token
	@[[ ! -f $(VLLM_STAMPS)/missing ]] || { cat $(VLLM_STAMPS)/missing >&2; exit 1; }
	@$(VLLM_VENV)/bin/python examples/offline_shared_prefix.py $(ARGS)

SOAK_MINUTES ?= 30
.PHONY: soak soak-engine soak-pool
soak: soak-engine soak-pool  ## Random faults for SOAK_MINUTES (30), of the engine and then of a pool (soak-engine, soak-pool): every byte checked, nothing stays, nothing grows
soak-engine: SOAK_OF := chaos
soak-pool: SOAK_OF := pool_chaos
soak-engine soak-pool: $(STAMPS)/installed $(STAMPS)/test
	@$(SUITE) $@ env PYTHONPATH=tests $(BIN)/python -m $(SOAK_OF).soak --seconds $$((60 * $(SOAK_MINUTES))) $(ARGS)

HANDOVER_REQUESTS ?= 200
.PHONY: soak-handover
soak-handover: $(VLLM_STAMPS)/installed  ## HANDOVER_REQUESTS (200) from prefill to decode engines that are killed and stopped at random: every token checked, no block stays
	@[[ ! -f $(VLLM_STAMPS)/missing ]] || { cat $(VLLM_STAMPS)/missing >&2; exit 1; }
	@$(SUITE) $@ env PYTHONPATH=tests $(VLLM_VENV)/bin/python -m vllm_testing.handover_run --requests $(HANDOVER_REQUESTS) $(ARGS)

.PHONY: docs
docs: $(STAMPS)/installed  ## Write the reference pages that are generated from the code
	$(BIN)/python tools/settings_reference.py docs/settings.md

.PHONY: clean
clean:  ## Remove everything that was built or installed here
	rm -rf build $(VENV) .venv-vllm-* dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# ---------------------------------------------------------------- set-up; a stamp is older than what it was made from

SYSTEMS := build test fuzz rdma-lab
$(SYSTEMS:%=$(STAMPS)/system-%): $(STAMPS)/system-%: tools/setup-system.sh
	@$(SUITE) setup tools/setup-system.sh $*
	@mkdir -p $(@D) && touch $@

$(STAMPS)/venv: pyproject.toml tools/requirements.py $(STAMPS)/system-build
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --upgrade pip
	@$(PYTHON) tools/requirements.py build-system project bench > $(STAMPS)/venv.txt
	@$(SUITE) setup $(BIN)/pip install --quiet -r $(STAMPS)/venv.txt
	@touch $@

# Built once, for every environment here.
$(STAMPS)/wheel: $(STAMPS)/venv $(PACKAGE_SOURCES)
	@rm -rf build/wheel
	@$(SUITE) build $(BIN)/pip wheel --quiet --no-build-isolation --no-deps --wheel-dir build/wheel \
		-Ccmake.define.MOONPOOL_WERROR=ON .
	@touch $@

# Installed, not editable: tests and the type checker see what users get.
$(STAMPS)/installed: $(STAMPS)/wheel
	@$(SUITE) setup $(BIN)/pip install --quiet --no-deps --force-reinstall build/wheel/*.whl
	@touch $@

$(VLLM_STAMPS)/venv: tools/setup-vllm.sh tools/setup-torch.sh tools/vllm/requirements-$(VLLM).txt $(STAMPS)/venv
	@$(PYTHON) tools/requirements.py project > $(STAMPS)/vllm.txt
	@$(PYTHON) tools/requirements.py test | grep -E '^(hypothesis|pytest)' >> $(STAMPS)/vllm.txt
	@$(SUITE) setup tools/setup-vllm.sh $(VLLM_VENV) tools/vllm/requirements-$(VLLM).txt $(STAMPS)/vllm.txt
	@touch $@

$(VLLM_STAMPS)/installed: $(VLLM_STAMPS)/venv $(STAMPS)/wheel
	@[[ -f $(VLLM_STAMPS)/missing ]] || \
		$(SUITE) setup $(VLLM_VENV)/bin/pip install --quiet --no-deps --force-reinstall build/wheel/*.whl
	@touch $@

$(STAMPS)/lint: $(STAMPS)/venv
	@$(PYTHON) tools/requirements.py lint > $(STAMPS)/lint.txt
	@$(SUITE) setup $(BIN)/pip install --quiet -r $(STAMPS)/lint.txt
	@touch $@

$(STAMPS)/test: $(STAMPS)/venv tools/setup-torch.sh
	@$(PYTHON) tools/requirements.py test > $(STAMPS)/test.txt
	@$(SUITE) setup $(BIN)/pip install --quiet -r $(STAMPS)/test.txt
	@$(SUITE) setup tools/setup-torch.sh $(VENV)
	@touch $@
