# make demo | make test | make test-all | make lint | make clean
# Another Python: make PYTHON=python3.12 VENV=.venv312 test      Only some tests: make test TESTS=tests/single

PYTHON ?= python3
VENV ?= .venv
TESTS ?=

BIN := $(VENV)/bin
# Errors are shown; warnings about the settings of pip on this machine are nothing that a person here can use.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check

.PHONY: help demo test test-all lint clean

help:
	@echo "make demo       train on 2 worker processes and on 1: the same results, and what is gained"
	@echo "make test       run the tests that find the usual mistakes, in about ten minutes"
	@echo "make test-all   run all tests: Horovod is built, root has real SLURM and ssh hosts; an hour or more"
	@echo "make lint       style, types and import contracts"
	@echo "make clean      remove what these made"

demo: $(VENV)/.demo
	@$(BIN)/python examples/demo.py

test: $(VENV)/.test
	$(BIN)/python $(if $(TESTS),-m pytest $(TESTS),.ci/run-tests quick $(BIN)/python)

test-all: test
	$(BIN)/python .ci/run-tests slow $(BIN)/python

lint: $(VENV)/.test
	$(BIN)/ruff check tfdistkit tests examples benchmarks
	$(BIN)/ruff format --check tfdistkit tests examples benchmarks
	$(BIN)/python -m mypy
	$(BIN)/lint-imports --no-cache

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache

# The stamps keep a second `make` from installing again; a change of setup.cfg installs what is new.
$(VENV)/.made: .ci/make-venv
	@.ci/make-venv "$(PYTHON)" "$(VENV)"
	@touch $@

$(VENV)/.demo: $(VENV)/.made setup.cfg pyproject.toml
	@echo "Installing tfdistkit and TensorFlow into $(VENV): about 1.5 GB, a minute or a few ..."
	@$(PIP_INSTALL) -e '.[cpu,examples]'
	@touch $@

$(VENV)/.test: $(VENV)/.made setup.cfg pyproject.toml
	@echo "Installing tfdistkit, TensorFlow and what the tests need into $(VENV) ..."
	@$(PIP_INSTALL) -e '.[cpu,test]'
	@touch $@
