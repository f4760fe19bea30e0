# `make` lists the targets. Another place for the virtual environment: make VENV=DIR ...; another Python: make PYTHON=...

VENV ?= .venv
TF ?= 2.20
BIN := $(abspath $(VENV))/bin
SUPPORTED := import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 11))

.PHONY: help venv test test-tf test-bazel lint quickstart fuzz clean

help:
	@echo 'make venv        install the package and all tools for development into $(VENV)'
	@echo 'make quickstart  sample data, training, evaluation and ranking in a few minutes'
	@echo 'make test        all tests; make test PYTEST_ARGS="-m \"not slow\"" leaves out the slow ones'
	@echo 'make test-tf     the same tests with another TensorFlow, TF=2.16 to TF=2.20, in a virtual environment of its own'
	@echo 'make test-bazel  the same tests under Bazel; BAZEL_ARGS=--config=quick leaves out the slow ones'
	@echo 'make lint        ruff and mypy'
	@echo 'make fuzz        the C++ core under libFuzzer with sanitizers for FUZZ_SECONDS=60; needs clang'
	@echo 'make clean       remove what building, testing and the quick start left, but not $(VENV)'

venv: $(VENV)/.installed

NATIVE := $(wildcard tpu_graphs/hlo/cc/*)

$(VENV)/.installed: setup.py $(NATIVE)
	@python='$(PYTHON)'; \
	for candidate in python3.11 python3.10 python3; do \
	  if test -z "$$python" && $$candidate -c '$(SUPPORTED)' 2>/dev/null; then python=$$candidate; fi; \
	done; \
	if ! $${python:-false} -c '$(SUPPORTED)'; then \
	  echo 'error: Python 3.10 or 3.11 is needed; name one with make PYTHON=...' >&2; exit 2; \
	fi; \
	echo "Installing into $(VENV) with $$python, some 2 GB"; \
	$$python -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --editable '.[dev]'
	@touch $@

test: venv
	$(BIN)/python -m pytest -n auto --dist loadfile $(PYTEST_ARGS)

# docs/newer_tensorflow.md says how. A second make runs the tests, with another VENV.
test-tf:
	$(MAKE) VENV=.venv-tf$(TF) .venv-tf$(TF)/.tensorflow
	$(MAKE) VENV=.venv-tf$(TF) test

$(VENV)/.tensorflow: $(VENV)/.installed
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-warn-conflicts \
	  'tensorflow==$(TF).*' 'tf_keras==$(TF).*' 'protobuf<7'
	@touch $@

test-bazel: venv
	PATH="$(BIN):$$PATH" bazel test $(BAZEL_ARGS) //...

lint: venv
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

fuzz:
	fuzz/run.sh $(or $(FUZZ_SECONDS),60)

quickstart: venv
	PATH="$(BIN):$$PATH" bash quickstart.sh

clean:
	rm -rf build dist *.egg-info fuzz/build fuzz/corpus .quickstart .hypothesis .pytest_cache .mypy_cache .ruff_cache
	find pipelines baselines tpu_graphs tests benchmarks docs -name __pycache__ -prune -exec rm -rf {} +
