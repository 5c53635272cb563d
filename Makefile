# make help says what there is. Needs Python >= 3.10, make and a C++ compiler; cmake and ninja come with pip.

PYTHON ?= python3
VENV   ?= .venv

BIN   := $(VENV)/bin
PIP   := $(BIN)/pip --disable-pip-version-check
BUILD := build/wheel
ASAN  := build/asan

VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' vendor/llama.cpp.toml)

# rings of tests, fastest first: folders of tests/
RINGS := unit build eval native tiny archs model server

# libllama without our code, for the tests that compare with it
export SNAPKV_PRISTINE_LIB := $(CURDIR)/$(BUILD)/pristine

# a missing library is a failure, not a skipped test
export SNAPKV_REQUIRE_LIB := 1

.NOTPARALLEL:
.PHONY: help venv bindings build native demo bench test $(RINGS:%=test-%) test-rpc test-gpu test-slow test-server-upstream docs-architectures docs-results asan lint check-patches clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile
	@echo '  make test-RING      one ring of tests: $(RINGS)'
	@echo 'CMAKE_ARGS="-DGGML_CUDA=ON" and the like choose backends, SNAPKV_LLAMA_SOURCE=... a local llama-cpp-python sdist.'

# setuptools: the build has no isolation, and jieba comes as source only
$(VENV)/.tools:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "Python >= 3.10 is needed, $(PYTHON) is $$($(PYTHON) --version 2>&1): make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	    { echo "$(PYTHON) cannot make a virtual environment: install its venv module (Debian: apt install python3-venv)"; exit 1; }
	$(PIP) install --quiet --upgrade 'pip>=23.1' 'scikit-build-core>=1.0' 'setuptools>=70.1' cmake ninja
	@touch $@

venv: $(VENV)/.tools ## the virtual environment with the build tools

# Without libraries of its own it installs in seconds, whatever CMAKE_ARGS says for our build. Not through pip's cache:
# another project of this user would get that wheel, which does not work without ours.
$(VENV)/.bindings-$(VERSION): | $(VENV)/.tools
	@sdist=$$($(BIN)/python cmake/vendor_llama.py --bindings) && \
	    echo "installing the bindings from $$sdist" && \
	    CMAKE_ARGS="-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF" $(PIP) install --quiet --no-cache-dir "$$sdist"
	@touch $@

bindings: $(VENV)/.bindings-$(VERSION) ## llama-cpp-python at the pinned version, without libraries

build: venv bindings ## build and install the package, incrementally
	@[ -d $(BUILD)/bin ] || echo "compiling llama.cpp: 5 to 10 minutes on two cores, the log is $(BUILD).log"
	@mkdir -p build
	@$(PIP) install -v --no-build-isolation '.[test,bench,eval]' > $(BUILD).log 2>&1 || \
	    { tail -n 60 $(BUILD).log; echo "make build failed, the whole log is $(BUILD).log"; exit 1; }

demo: build ## the main job on the small real model
	$(BIN)/snapkv demo

bench: build ## prefill, pass and decode, full and compacted
	$(BIN)/snapkv bench

native: build ## the native tests, libllama and llama-server without our code
	$(BIN)/cmake $(BUILD) -DSNAPKV_BUILD_TESTS=ON -Wno-author > $(BUILD)/tests.log || { cat $(BUILD)/tests.log; exit 1; }
	$(BIN)/cmake --build $(BUILD) --target snapkv-tests test-llama-archs llama-pristine llama-server-pristine

test: $(RINGS:%=test-%) ## every test

test-native: native
	$(BIN)/ctest --test-dir $(BUILD) --output-on-failure
	@$(MAKE) pytest RING=native

test-tiny test-archs test-model test-server: native
	@$(MAKE) pytest RING=$(@:test-%=%)

test-unit test-build test-eval: build
	@$(MAKE) pytest RING=$(@:test-%=%)

# other processes, and 128K cells that would go over a socket
CPU_ONLY := --ignore tests/tiny/test_identity.py --ignore tests/tiny/test_scratch.py

test-rpc: native ## the tests of the pass with layers on rpc-servers on this machine
	@for device in rpc rpc-half; do \
	    echo "SNAPKV_TEST_DEVICE=$$device" && SNAPKV_TEST_DEVICE=$$device $(BIN)/pytest -q tests/tiny $(CPU_ONLY) || exit 1; \
	done

GPU := build/gpu

test-gpu: native ## the tests of the pass on a GPU: make test-gpu CMAKE_ARGS="-DGGML_CUDA=ON"
	$(BIN)/cmake -S . -B $(GPU) -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python -Wno-author $(CMAKE_ARGS)
	$(BIN)/cmake --build $(GPU) --target llama
	SNAPKV_TEST_DEVICE=gpu SNAPKV_GGUF_LIB_PATH=$(CURDIR)/$(GPU)/bin $(BIN)/pytest -q tests/tiny $(CPU_ONLY)

docs-architectures: native ## the tables of docs/architectures.md
	PYTHONPATH=tests:tests/archs $(BIN)/python tests/archs/page.py

docs-results: build ## the tables of README.md and docs/, from the runs in docs/results/
	$(BIN)/python tools/results_tables.py

test-slow: native ## the tests that take minutes each: load, fuzzing, long answers
	$(BIN)/pytest -q -s -m slow tests

UPSTREAM := build/upstream-tests

$(UPSTREAM)/bin/pytest: | $(VENV)/.tools
	$(BIN)/python -m venv $(UPSTREAM)
	$(UPSTREAM)/bin/pip --disable-pip-version-check install --quiet pytest filelock aiohttp openai prometheus-client requests wget gguf numpy platformdirs

test-server-upstream: native $(UPSTREAM)/bin/pytest ## upstream's own server tests on both servers
	PYTHONPATH=$(CURDIR) $(UPSTREAM)/bin/python tests/server/upstream.py --report $(UPSTREAM).md \
	    --binary ours=$$($(BIN)/python -c 'from snapkv_gguf import server; print(server.binary())') \
	    --binary upstream=$(BUILD)/pristine/llama-server

.PHONY: pytest
pytest: # a ring that has no folder yet passes
	@if ls tests/$(RING)/test_*.py > /dev/null 2>&1; then $(BIN)/pytest -q tests/$(RING); fi

asan: venv ## the native tests under AddressSanitizer and UndefinedBehaviorSanitizer
	$(BIN)/cmake -S . -B $(ASAN) -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python \
	    -DCMAKE_BUILD_TYPE=RelWithDebInfo -DSNAPKV_SANITIZE=address,undefined -DSNAPKV_BUILD_TESTS=ON -Wno-author
	$(BIN)/cmake --build $(ASAN) --target snapkv-tests
	$(BIN)/ctest --test-dir $(ASAN) --output-on-failure

lint: build ## ruff and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

check-patches: venv ## patches/ against upstream and the hook table
	@$(BIN)/python cmake/vendor_llama.py
	@PYTHONDONTWRITEBYTECODE=1 $(BIN)/python cmake/check_patches.py

clean: ## remove what was built, the virtual environment and the unpacked sources
	rm -rf build $(VENV) vendor/llama.cpp vendor/llama.cpp-pristine vendor/.llama.cpp* vendor/.lock
