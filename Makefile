# Everything a checkout needs: `make demo` to see it run, `make test` before a push.
# Set-up is stamped: a second run costs nothing until pyproject.toml, constraints.txt or a set-up script changes.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
TOOLS := .tools
PYTEST_ARGS ?=
# Test files that run at the same time: five with real processes, which mostly wait, and one that computes meanwhile.
JOBS ?= 6
QUICK := $(addprefix tests/,wire storage raft metadata replication groups client observe doctor test_docs.py)
# The rules of the sources, a part of `make check`.
RULES := tests/test_rooms.py tests/test_asserts.py
BENCH_ARGS ?=
# Of `make soak`: how long, and the seed that an earlier run printed.
SECONDS ?= 1800
SEED ?=

VENV_STAMP := $(VENV)/.stamp-venv
SOURCES := $(shell find src -type f -not -name '*.pyc')
RUN_STAMP := $(VENV)/.stamp-run
DEV_STAMP := $(VENV)/.stamp-dev
TOOLS_STAMP := $(TOOLS)/.stamp
BENCH_TOOLS_STAMP := $(TOOLS)/.stamp-bench
SPARK_ARCHIVE := $(TOOLS)/spark.jsa
# The wheel, installed: what the nodes of the tests, of `make bench` and of `make soak` run.
COMPILED := .compiled
COMPILED_STAMP := $(COMPILED)/.stamp
TESTED := TESTED_CHRONIK=$(CURDIR)/$(COMPILED)/installed

# Both names: pip up to 25.2 reads the first for build environments as well, later ones only the second.
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_BUILD_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# pip installs into .venv in more than one rule.
.NOTPARALLEL:
.PHONY: help setup bytecode wheel demo test test-quick check audit bench soak soak-counts clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1: /p' Makefile

setup: $(RUN_STAMP) ## .venv with the run time; .venv/bin/chronik exists after it

# As pip does for what it installs from an archive: where Python is told to write none, every start of a node would
# compile all of its source again (0.25 s).
bytecode: $(RUN_STAMP)
	@$(BIN)/python -m compileall -q src

wheel: $(COMPILED_STAMP) ## wheels in dist: compiled if there is a C compiler, and pure
	@rm -rf dist/chronik-*.whl && mkdir -p dist
	@cp $(COMPILED)/wheel/*.whl dist/
	@CHRONIK_COMPILE=no $(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	@ls dist/chronik-*.whl

demo: $(RUN_STAMP) bytecode ## the whole story on one machine, on free ports
	@$(BIN)/chronik demo

# PYTHONDONTWRITEBYTECODE is empty because every worker would otherwise compile all tests again at each run (8 s).
test: check $(TOOLS_STAMP) $(SPARK_ARCHIVE) $(COMPILED_STAMP) bytecode ## check, then the whole suite, with real clients
	@PYTHONDONTWRITEBYTECODE= $(TESTED) $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder \
		$(addprefix --ignore=,$(RULES)) $(PYTEST_ARGS)

test-quick: check bytecode ## check, then the tests of the pure packages, storage and the client: about 90 seconds
	@$(BIN)/python -m pytest -q -n $(JOBS) $(QUICK) $(PYTEST_ARGS)

check: $(DEV_STAMP) ## format, lint, security rules, types, import direction
	@$(BIN)/ruff format --check
	@$(BIN)/ruff check
	@$(BIN)/mypy --strict
	@$(BIN)/python -m pytest -q $(RULES)

audit: $(VENV_STAMP) ## known vulnerabilities of the pinned versions, if an index of advisories can be reached
	@$(BIN)/python scripts/audit $(TOOLS)/audit

bench: $(DEV_STAMP) $(TOOLS_STAMP) $(BENCH_TOOLS_STAMP) $(COMPILED_STAMP) bytecode ## Chronik against its goals and beside Apache Kafka; writes bench/results
	@$(TESTED) $(BIN)/python bench/run.py $(BENCH_ARGS)

soak: $(DEV_STAMP) $(COMPILED_STAMP) bytecode ## faults on real processes and simulated ones for SECONDS=1800; writes bench/results/soak.json
	@$(TESTED) $(BIN)/python -m tests.faults.soak --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

soak-counts: $(DEV_STAMP) $(TOOLS_STAMP) $(COMPILED_STAMP) bytecode ## the long tests with fixed counts, however long they take
	@$(TESTED) $(BIN)/python -m pytest -m soak $(PYTEST_ARGS)

clean: ## remove what set-up and the tools made; data folders stay
	@rm -rf $(VENV) $(TOOLS) $(COMPILED) dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV_STAMP): scripts/find-python
	@python="$$(bash scripts/find-python)" && "$$python" -m venv $(VENV)
	@touch $@

$(RUN_STAMP): pyproject.toml constraints.txt scripts/find-java $(VENV_STAMP)
	@bash scripts/find-java
	@echo "chronik: installing the run time into $(VENV)"
	@$(BIN)/python -m pip install --quiet -e '.[spark,sql,iceberg]'
	@touch $@

# With the run time, so that pip resolves and builds once.
$(DEV_STAMP): pyproject.toml constraints.txt scripts/find-java $(VENV_STAMP)
	@bash scripts/find-java
	@echo "chronik: installing the run time and what the tests need into $(VENV)"
	@$(BIN)/python -m pip install --quiet -e '.[dev,spark,sql,iceberg]'
	@touch $(RUN_STAMP) $@

# pip does not show why a wheel is pure, so its record is printed.
$(COMPILED_STAMP): $(VENV_STAMP) pyproject.toml constraints.txt scripts/build_backend.py $(SOURCES)
	@echo "chronik: building the wheel that the nodes of tests and measurements run"
	@rm -rf $(COMPILED)
	@$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir $(COMPILED)/wheel .
	@$(BIN)/python -m pip install --quiet --no-deps --target $(COMPILED)/installed $(COMPILED)/wheel/*.whl
	@$(BIN)/python scripts/build-reason $(COMPILED)/installed/chronik/build.json
	@touch $@

$(TOOLS_STAMP): scripts/test-tools tests/clients/java/pom.xml $(filter-out %/spark-typed.xml,$(wildcard tests/support/apache/*.xml tests/clients/go/*))
	@bash scripts/test-tools $(TOOLS)

$(BENCH_TOOLS_STAMP): $(TOOLS_STAMP) $(VENV_STAMP) tests/support/apache/spark-typed.xml
	@bash scripts/test-tools $(TOOLS) bench

$(SPARK_ARCHIVE): $(DEV_STAMP) tests/support/spark_archive.py
	@echo "chronik: archiving Spark's classes, so that the JVMs of the tests start in half the time"
	@mkdir -p $(TOOLS)
	@$(BIN)/python -m tests.support.spark_archive $@
