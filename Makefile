# make demo   install into .venv, train a small model on real text, sample from it
# make test   the test suite, make slow its longest tests, make tpu those that compile for TPUs (0.5 GB to install)
#             make test PYTHON=python3.13  uses that Python, in .venv-3.13
# make lint   style and types;  make format  rewrites;  make clean  removes what these made, except runs/

PYTHON ?= python3
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
VENV ?= $(if $(filter python3,$(PYTHON)),.venv,.venv-$(VERSION))
BIN := $(VENV)/bin

ifeq ($(filter clean help,$(MAKECMDGOALS)),)
ifeq ($(filter $(VERSION),3.11 3.12 3.13),)
$(error Python 3.11, 3.12 or 3.13 is needed, but $(PYTHON) is "$(VERSION)"; try make $(MAKECMDGOALS) PYTHON=python3.13)
endif
endif

CONSTRAINTS := constraints/$(if $(filter 3.11,$(VERSION)),py311,py313).txt
# Stamps carry the version: another python3 behind the same name starts a new environment.
RUN := $(VENV)/installed-$(VERSION)
DEV := $(VENV)/installed-dev-$(VERSION)
AOT := $(VENV)/installed-aot-$(VERSION)
PIP = $(BIN)/python -m pip install --disable-pip-version-check -c $(CONSTRAINTS)

.PHONY: demo test slow tpu lint format clean help
.DEFAULT_GOAL := help

help:
	@sed -n '1,4s/^# //p' Makefile

demo: $(RUN)
	$(BIN)/dsflash train demo

test: $(DEV)
	$(BIN)/python -m pytest -n auto --dist loadfile -m 'not slow'

slow: $(DEV)
	$(BIN)/python -m pytest -n auto --dist loadfile -m 'slow and not tpu'

tpu: $(AOT)
	$(BIN)/python -m pytest -n 0 -m tpu

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .venv-* build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find dsflash_jax train configs tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python$(VERSION):
	@echo "== Making $(VENV) with Python $(VERSION)"
	$(PYTHON) -m venv --clear $(VENV)

$(RUN): pyproject.toml $(CONSTRAINTS) | $(BIN)/python$(VERSION)
	@echo "== Installing into $(VENV), versions from $(CONSTRAINTS): a minute or two the first time"
	$(PIP) -e .
	touch $@

$(DEV): pyproject.toml $(CONSTRAINTS) | $(BIN)/python$(VERSION)
	@echo "== Installing with the dev extra into $(VENV), versions from $(CONSTRAINTS): a minute or two the first time"
	$(PIP) -e '.[dev]'
	touch $(RUN) $@

$(AOT): $(DEV)
	@echo "== Installing libtpu into $(VENV), the compiler for TPUs: 0.5 GB"
	$(PIP) -e '.[dev,aot]'
	touch $@
