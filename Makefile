# On a fresh machine with Python 3.11, run `make demo` or `make test`. See `make help`.

PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/pip install
TESTS := $(BIN)/pytest -q --durations=40
SEEDS ?= 10000
MINUTES ?= 5
SEED ?= 1
INSTALLED := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo test tests lint unit servers alone compose-check secrets kafka simulate chaos numerics paper \
	nightly format clean

help:  ## list all targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

install: $(INSTALLED)  ## create .venv and install everything, pinned

$(INSTALLED): pyproject.toml common/public/pyproject.toml constraints.txt | $(BIN)/pip
	@echo "installing (PyTorch is large: this takes a minute or more) ..."
	$(INSTALL) --quiet --constraint constraints.txt --editable common/public --editable '.[dev]'
	@touch $@

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or later is needed: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv .venv

demo: $(INSTALLED)  ## train on a live stream, kill a worker half-way, and prove that nothing was lost
	$(BIN)/doll demo --out out/demo

test: $(INSTALLED)  ## run all checks that this machine supports; `make nightly` adds more
	$(MAKE) --output-sync=target lint & lint=$$!; $(MAKE) tests; tests=$$?; wait $$lint && exit $$tests

tests: $(INSTALLED)  ## run `make test` without lint
	$(MAKE) --output-sync=target unit & unit=$$!; \
		{ $(MAKE) servers && $(MAKE) alone; }; servers=$$?; wait $$unit && exit $$servers

lint: $(INSTALLED)  ## check style, types and architecture
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	nice $(BIN)/mypy
	nice $(BIN)/python -m tests.test_architecture  # number of files that each process imports

unit: $(INSTALLED)  ## test the pure parts, and the protocol under seeded fault schedules
	nice -n 10 $(TESTS) -n 2 --dist worksteal --timeout=1200 -m "not nightly" \
		tests/system tests/unit tests/test_architecture.py tests/test_prose.py  # runs niced beside `servers`, hence the long timeout

servers: $(INSTALLED)  ## test ports and processes on every Kafka and Redis available here
	$(TESTS) -rs -n 2 --dist loadfile -m "not alone and not nightly" tests/contract tests/integration

alone: $(INSTALLED)  ## run time-critical tests of processes; only niced processes may run beside them
	$(TESTS) -rs -m "alone and not nightly" $$(grep -rl --include='*.py' 'mark\.alone' tests/integration)

compose-check: $(INSTALLED)  ## check docker-compose.yml with the oldest supported docker-compose
	TEST_REQUIRE_SERVERS=1 $(BIN)/pytest -q tests/unit/deploy/test_compose.py tests/unit/deploy/test_compose_check.py

secrets:  ## create missing secrets of docker-compose.yml
	deploy/compose/make-secrets

kafka: $(INSTALLED)  ## run Apache Kafka on a free port until Ctrl-C (Java 17, Maven)
	$(BIN)/python -m common.embedded.apache_kafka --data out/kafka

simulate: $(INSTALLED)  ## simulate the protocol under SEEDS=10000 fault schedules
	$(BIN)/python -m common.simulation --seeds 0 $(SEEDS)

chaos: $(INSTALLED)  ## kill, freeze and disconnect everything on a real stack for MINUTES=5, seeded by SEED=1
	$(BIN)/python load/chaos.py --minutes $(MINUTES) --seed $(SEED)

numerics: $(INSTALLED)  ## run floating-point tests under each kernel that this processor supports
	nice $(BIN)/python -m tests.kernels -n 2 --timeout=1200

paper: $(INSTALLED)  ## reproduce section V of the paper by simulation (some minutes; writes docs/explain/paper)
	$(BIN)/python -m load.paper

nightly: simulate chaos numerics  ## run everything too long for every change: 10,000 schedules, chaos, kernels
	! command -v go >/dev/null || $(MAKE) .tools/helm
	TEST_SINCE= $(TESTS) -n 2 --hypothesis-profile=nightly tests/system tests/unit
	TEST_SINCE=HEAD $(TESTS) -rs -m nightly tests/integration  # includes tests that wait for a change

.tools/helm:  # needed by the chart's tests
	GOBIN=$(CURDIR)/.tools CGO_ENABLED=0 go install -ldflags='-s -w' helm.sh/helm/v3/cmd/helm@v3.18.6

format: $(INSTALLED)  ## fix style with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove all generated files
	rm -rf .venv .tools out deploy/kafka/target
