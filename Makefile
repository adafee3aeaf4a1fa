# Meshwright: everything a developer or CI does. Each target sets up what it needs; repeating one is quick.
#
#   make demo     plan, train and verify a small model on this machine
#   make test     format, lint, types, then all tests
#   make check    only format, lint and types
#   make bench    measure the training step beside DistributedDataParallel
#   make docs     write the generated pages of docs/, and other golden files, anew
#   make clean    remove .venv and build folders
#
# Tests go two at a time, whole files each, long ones first; those over ranks start up to eight processes of their own.
#
# Options:
#   PYTHON=python3.12      the interpreter that makes .venv (3.11 or newer)
#   TORCH_INDEX=URL        where pip finds torch, for example https://download.pytorch.org/whl/cpu for the small
#                          CPU build on Linux; default: wherever pip is set up to look
#   ARGS=...               more arguments for pytest, the demo or the benchmark

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
TORCH := torch==2.13.*
TORCH_INDEX ?=
# Compiled modules are kept, or each of the many processes that are started would compile torch anew.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(BIN)/python -m pip --disable-pip-version-check --no-input install --quiet --no-compile
SOURCES := src tests $(wildcard benchmarks examples) conftest.py
ARGS ?=

PYTHON ?= $(firstword $(foreach name,python3 python3.14 python3.13 python3.12 python3.11,\
    $(shell $(name) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(name))))

.PHONY: help venv test check demo bench docs clean

help:
	@sed -n '/^#   make/s/^#   //p' Makefile

venv: $(STAMP)

$(STAMP): pyproject.toml
	@[ -n "$(PYTHON)" ] || { echo "make: Python 3.11 or newer is needed, none was found;" \
	    "install one, or name it: make PYTHON=/path/to/python3 ..." >&2; exit 1; }
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "make: $(PYTHON) -m venv failed;" \
	    "on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@echo "Installing into $(VENV) (a few minutes the first time)"
	@[ -z "$(TORCH_INDEX)" ] || $(INSTALL) --index-url $(TORCH_INDEX) "$(TORCH)"
	@$(INSTALL) --editable ".[dev]"
	@touch $@

check: $(STAMP)
	@$(BIN)/ruff format --check --quiet $(SOURCES) || { echo "make: run $(BIN)/ruff format $(SOURCES)" >&2; exit 1; }
	@$(BIN)/ruff check --quiet $(SOURCES)
	@$(BIN)/mypy --no-error-summary
	@echo "format, lint and types are clean"

test: check
	@$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder $(ARGS)

demo: $(STAMP)
	@$(BIN)/meshwright demo $(ARGS)

bench: $(STAMP)
	@$(BIN)/python benchmarks/train_step.py $(ARGS)

docs: $(STAMP)
	@$(BIN)/python -m pytest tests/docs tests/claims tests/cli --regenerate $(ARGS)

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache
