# Two commands on a fresh machine with Python 3.11: make demo, make test. See `make help`.

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

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

install: $(INSTALLED)  ## make .venv and install everything, pinned

$(INSTALLED): pyproject.toml common/public/pyproject.toml constraints.txt | $(BIN)/pip
	@echo "installing (PyTorch is large: this takes a minute or more) ..."
	$(INSTALL) --quiet --constraint constraints.txt --editable common/public --editable '.[dev]'
	@touch $@

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or later is needed: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv .venv

demo: $(INSTALLED)  ## train on a live stream, kill a worker half-way, prove that nothing was lost
	$(BIN)/doll demo --out out/demo

test: $(INSTALLED)  ## everything that this machine can check, but for what `make nightly` adds
	$(MAKE) --output-sync=target lint & lint=$$!; $(MAKE) tests; tests=$$?; wait $$lint && exit $$tests

tests: $(INSTALLED)  ## `make test` without lint
	$(MAKE) --output-sync=target unit & unit=$$!; \
		{ $(MAKE) servers && $(MAKE) alone; }; servers=$$?; wait $$unit && exit $$servers

lint: $(INSTALLED)  ## style, types, architecture
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	nice $(BIN)/mypy
	nice $(BIN)/python -m tests.test_architecture  # how many files each process imports

unit: $(INSTALLED)  ## the pure parts, and the protocol under seeded schedules of faults
	nice -n 10 $(TESTS) -n 2 --dist worksteal --timeout=1200 -m "not nightly" \
		tests/system tests/unit tests/test_architecture.py tests/test_prose.py  # while servers wait, however long it takes then

servers: $(INSTALLED)  ## ports and processes, on every Kafka and Redis that can be had here
	$(TESTS) -rs -n 2 --dist loadfile -m "not alone and not nightly" tests/contract tests/integration

alone: $(INSTALLED)  ## tests of processes that no others may slow down but nice ones
	$(TESTS) -rs -m "alone and not nightly" $$(grep -rl --include='*.py' 'mark\.alone' tests/integration)

compose-check: $(INSTALLED)  ## docker-compose.yml, by the oldest docker-compose that must read it
	TEST_REQUIRE_SERVERS=1 $(BIN)/pytest -q tests/unit/deploy/test_compose.py tests/unit/deploy/test_compose_check.py

secrets:  ## the secrets of docker-compose.yml that are not there yet
	deploy/compose/make-secrets

kafka: $(INSTALLED)  ## a real Apache Kafka on a free port until Ctrl-C (Java 17, Maven)
	$(BIN)/python -m common.embedded.apache_kafka --data out/kafka

simulate: $(INSTALLED)  ## the protocol under SEEDS=10000 fault schedules
	$(BIN)/python -m common.simulation --seeds 0 $(SEEDS)

chaos: $(INSTALLED)  ## kill, freeze and cut off everything on a real stack for MINUTES=5, seeded by SEED=1
	$(BIN)/python load/chaos.py --minutes $(MINUTES) --seed $(SEED)

numerics: $(INSTALLED)  ## the tests that compute with floats, under each kernel that this processor can run
	nice $(BIN)/python -m tests.kernels -n 2 --timeout=1200

paper: $(INSTALLED)  ## section V of the paper, reproduced by simulation: some minutes, writes docs/explain/paper
	$(BIN)/python -m load.paper

nightly: simulate chaos numerics  ## all that is too long for every change: 10,000 schedules, chaos, kernels
	! command -v go >/dev/null || $(MAKE) .tools/helm
	TEST_SINCE= $(TESTS) -n 2 --hypothesis-profile=nightly tests/system tests/unit
	TEST_SINCE=HEAD $(TESTS) -rs -m nightly tests/integration  # so what waits for a change, too

.tools/helm:  # for the tests of the chart
	GOBIN=$(CURDIR)/.tools CGO_ENABLED=0 go install -ldflags='-s -w' helm.sh/helm/v3/cmd/helm@v3.18.6

format: $(INSTALLED)  ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove everything that make made
	rm -rf .venv .tools out deploy/kafka/target
