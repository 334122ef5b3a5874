# Every target works on a bare machine with Python 3.11+; CI calls the very same ones.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
CONSTRAINTS ?= constraints.txt
EXTRAS ?= dev,examples
PROCESSES ?= 2
# The tests of a file stay together, as they share its fixtures; what is slow comes first.
IN_PROCESSES := --numprocesses=$(PROCESSES) --dist=loadfile --no-loadscope-reorder
# Tests start hundreds of processes: each would compile every module that it imports.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo generate test test-all test-oldest test-release paths fuzz chaos mutants lint typecheck format bench figures site clean

demo: $(INSTALLED)  ## compile the shipped example, serve it, call it, compare it
	$(BIN)/python -m examples.demo $(if $(KEEP),--keep)

generate: $(INSTALLED)  ## train a small model that writes text, compile it, serve it, ask it
	$(BIN)/python -m examples.generate $(if $(MODELS),--models $(MODELS))

test: $(INSTALLED)  ## the tests but those marked slow, in PROCESSES processes
	$(BIN)/python -m pytest -m "not slow" $(IN_PROCESSES)

test-all: $(INSTALLED)  ## all tests, and which 20 of them took longest
	THOROUGH=1 $(BIN)/python -m pytest --durations=20 $(IN_PROCESSES)

test-oldest:  ## the tests with the oldest versions that pyproject.toml declares, in .venv-oldest
	$(MAKE) test VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt EXTRAS=dev

test-release: $(INSTALLED)  ## the wheel in bare environments, with the tested and the oldest versions
	$(BIN)/python -m pytest tests/e2e/test_release.py

paths: $(INSTALLED)  ## the scripts of examples/paths, each from its beginning to its end
	for script in examples/paths/*.sh; do PYTHON=$(abspath $(BIN))/python $$script || exit; done

fuzz: $(INSTALLED)  ## feed everything that reads bytes with broken ones, for MINUTES
	$(BIN)/python -m tests.fuzz --minutes $(or $(MINUTES),30) $(if $(SEED),--seed $(SEED))

chaos: $(INSTALLED)  ## a real server under load while everything goes wrong, for MINUTES
	$(BIN)/python -m tests.chaos --minutes $(or $(MINUTES),10) $(if $(SEED),--seed $(SEED))

mutants: $(INSTALLED)  ## changes of PACKAGE that its tests do not notice, by cosmic-ray
	mkdir -p build
	test -f build/$(PACKAGE).sqlite || $(BIN)/cosmic-ray init tests/mutants/$(PACKAGE).toml build/$(PACKAGE).sqlite
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/cosmic-ray exec tests/mutants/$(PACKAGE).toml build/$(PACKAGE).sqlite
	$(BIN)/cr-report --surviving-only --show-diff build/$(PACKAGE).sqlite

lint: $(INSTALLED)  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: $(INSTALLED)  ## mypy, strict, on all packages
	$(BIN)/mypy

format: $(INSTALLED)  ## mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)  ## measure: the example against its source model, and the threshold search
	test -d demo/fashion.ee || $(BIN)/eecompile examples/fashion/fashion_resnet56.onnx \
	    --data examples/fashion/calibration.npz --output demo/fashion.ee
	$(BIN)/eebench compare demo/fashion.ee --data examples/fashion/test.npz
	$(BIN)/python -m benchmarks.thresholds

figures: $(INSTALLED)  ## measure all figures of README and docs, or RESULTS, and fill the tables
	$(BIN)/python -m offramp.tools.figures --measure $(RESULTS) $(if $(BUSY),--busy)

site: $(INSTALLED)  ## the site of the documentation, into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) .venv-oldest demo build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) --editable '.[$(EXTRAS)]'
	touch $@
