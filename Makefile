# Two commands for a newcomer: `make demo` and `make test`. Each sets up what it needs in .venv.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
READY := .venv/.ready
OUT := out

.PHONY: help setup demo test test-slow test-alone test-faults test-torch test-slurm test-ray test-postgres lint bench bench-quick bench-rubick bench-engines compare-all lock clean

help:
	@echo "make demo   replay a real trace under four policies, write out/demo.html; then a live cluster for a minute"
	@echo "make test   run all tests (test-slow, -alone, -faults, -torch, -slurm, -ray, -postgres are the others)"
	@echo "make bench  measure speed, write benchmarks/results/"
	@echo "make bench-rubick  Rubick and its baselines on the published 406 jobs, write benchmarks/results/rubick.json"
	@echo "make compare-all  every policy on real traces and three networks: docs/comparison.md, out/compare-all.html"
	@echo "make setup  only make .venv; the command is then .venv/bin/thebes"
	@echo "make lint   ruff, pyright, import contracts"

setup: $(READY)

$(READY): requirements/dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Thebes needs Python 3.11 or newer: make setup PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	$(BIN)/python -m thebes.sim.warmup
	@touch $(READY)

demo: $(READY)
	@mkdir -p $(OUT)
	$(BIN)/thebes compare philly-sample --cluster 8x8 --policies fifo,srtf,tiresias-l,tiresias-g \
	  --json $(OUT)/demo.json --report $(OUT)/demo.html
	@echo
	@echo "The report is $(OUT)/demo.html: open it in a browser."
	@echo
	@echo "Now live: real training processes on 8 virtual GPUs, preempted by tiresias-l, beside the simulator's prediction."
	$(BIN)/thebes rehearse --jobs 40 --seconds 60 --json $(OUT)/rehearsal.json

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not alone and not faults and not torch and not slurm and not ray and not postgres"

test-slow: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "slow and not slurm and not ray and not postgres"

# Measures a live cluster against the simulator: nothing else may run beside it.
test-alone: $(READY)
	$(BIN)/python -m pytest -m alone

test-faults: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m faults

# PyTorch is large and only these tests need it.
test-torch: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/torch.txt
	$(BIN)/python -m pytest -m "torch and not slurm and not ray"

# Slurm comes from Debian: slurmctld slurmd slurm-client munge iproute2. Needs root for fake GPUs and namespaces.
test-slurm: $(READY)
	$(BIN)/python -m pytest -m slurm

# Ray is large and only these tests need it.
test-ray: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/ray.txt
	$(BIN)/python -m pytest -m ray

# PostgreSQL comes from Debian: postgresql.
test-postgres: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m postgres

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

bench: $(READY)
	$(BIN)/python -m benchmarks.run

bench-quick: $(READY)
	$(BIN)/python -m benchmarks.run --quick

# Three workloads, three costs of a restart, ten policies; some minutes.
bench-rubick: $(READY)
	$(BIN)/python -m benchmarks.rubick

# What it costs to carry a decision out on Slurm (64 nodes) and Ray (4), on clusters made for the purpose.
bench-engines: $(READY)
	$(BIN)/python -m benchmarks.engines --trials --out $(OUT)/engines.json

# All policies on the traces that ship and three networks; under 15 minutes on 2 cores.
compare-all: $(READY)
	$(BIN)/python -m benchmarks.compare_all
	@echo "The report is $(OUT)/compare-all.html, the tables are in docs/comparison.md."

# No index address ends up in the lock file.
lock:
	uv pip compile pyproject.toml --extra report --extra live --extra postgres --group dev --python-version 3.11 --universal \
	  --generate-hashes --no-emit-index-url --no-header --no-annotate -o requirements/dev.txt

clean:
	rm -rf .venv $(OUT) .pytest_cache .ruff_cache .hypothesis
