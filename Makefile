# Commands of the project. `make help` lists them; each creates .venv when it is missing.
#   PYTHON=python3.12     another interpreter (3.11 or later)
#   TORCH_INDEX_URL=...   index with torch's CPU build, if pip's default index has none (see README.md)

SHELL := /bin/bash
PYTHON ?=
TORCH_INDEX_URL ?=
AREA ?=
BIN := .venv/bin
SOURCES := $(foreach folder,prfaas tests tools benchmarks,$(if $(shell find $(folder) -name '*.py' -print -quit 2>/dev/null),$(folder)))

# Tests and the demo start many processes. Each would compile all its imports again if none kept the bytecode.
export PYTHONDONTWRITEBYTECODE :=
export PYTHONPYCACHEPREFIX := $(CURDIR)/.venv/bytecode

.DEFAULT_GOAL := help
.PHONY: help demo demo-wan test lint type site check bench soak format docs audit sbom

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.venv/demo-installed .venv/installed: pyproject.toml tools/install.sh
	@PYTHON="$(PYTHON)" TORCH_INDEX_URL="$(TORCH_INDEX_URL)" tools/install.sh $(@F)

demo: .venv/demo-installed ## two clusters on this machine with real vLLM; MODEL=gemma3, MODEL=llama
	@$(BIN)/python -m tools.demo

demo-wan: .venv/demo-installed ## two clusters over an emulated long link with the dashboard (root); RTT=80ms LOSS=0.001 RATE=300Mbps
	@RTT="$(RTT)" LOSS="$(LOSS)" RATE="$(RATE)" PAGE="$(PAGE)" $(BIN)/python -m tools.demo_wan

test: .venv/installed ## all tests except the long ones; ARGS="-k wire" selects
	@$(BIN)/python -m pytest -n 3 --durations=10 $(ARGS)

lint: .venv/installed ## ruff, import contracts, and the style of names and sentences
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports
	@$(BIN)/python tools/check_style.py

type: .venv/installed ## mypy, strict
	@$(BIN)/mypy $(SOURCES)

site: .venv/installed ## build the documentation site in build/site; warnings are errors
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

check: lint type site test ## everything that CI runs: lint, types, site, tests

bench: .venv/installed ## measure one area: AREA=transport (a folder of benchmarks/)
	@test -f "benchmarks/$(AREA)/__main__.py" || { echo "AREA is missing: make bench AREA=<one of: $$(cd benchmarks && echo */__main__.py | sed 's,/__main__.py,,g')>"; exit 2; }
	@$(BIN)/python -m benchmarks.$(AREA) $(ARGS)

soak: .venv/installed ## long tests
	@$(BIN)/python -m pytest -m soak --timeout=3600 $(ARGS)
	@$(BIN)/python -m pytest tests/property tests/unit/transport --hypothesis-profile=soak --timeout=3600 $(ARGS)

format: .venv/installed ## apply the formatter
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: .venv/installed ## rewrite the generated tables of docs/ and the files of deploy/
	@$(BIN)/python -m tools.reference_tables

audit: .venv/installed ## list known vulnerabilities of installed packages
	@$(BIN)/python -m tools.audit

sbom: .venv/installed ## write a bill of materials (CycloneDX) to build/sbom.json
	@mkdir -p build && $(BIN)/cyclonedx-py environment $(BIN)/python --output-format JSON --output-file build/sbom.json $(ARGS)
