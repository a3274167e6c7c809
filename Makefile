# `make demo` and `make test` do all the set-up themselves, in .venv, with the newest Python of 3.13, 3.12 and 3.11 found here.
# Another one: make test PYTHON=/path/to/python3.11. More arguments for pytest: make test ARGS="-m oldest -k plan".
SHELL := /bin/bash
VENV ?= .venv
ifeq ($(origin PYTHON),undefined)
PYTHON := $(shell .ci/python 3.13 3.12 3.11)
endif
WORKERS ?= 2
ARGS ?=

.PHONY: demo test lint format setup clean
.DEFAULT_GOAL := test

setup:
	@test -n "$(PYTHON)"
	@.ci/setup "$(VENV)" "$(PYTHON)"

demo: setup
	JAX_PLATFORMS=cpu $(VENV)/bin/python -m forebay.training.demo $(ARGS)

test: setup
	$(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright

format: setup
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:
	rm -rf .venv .venv-* .pytest_cache .ruff_cache .hypothesis dist build
