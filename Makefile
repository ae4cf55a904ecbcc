# Two commands for a newcomer: `make demo` and `make test`. Each sets up what it needs in .venv.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
READY := .venv/.ready
OUT := out

.PHONY: help setup demo test test-pure test-live test-others test-slow test-alone test-faults test-torch test-slurm test-ray \
  test-postgres kernels torch ray coverage wheel lint bench bench-quick bench-rubick bench-engines compare-all lock clean

help:
	@echo "make demo   replay a real trace under four policies, write out/demo.html; then a live cluster for a minute"
	@echo "make test   run the tests: test-pure and test-live at once (test-others: -slow, -faults, -torch, -slurm,"
	@echo "            -ray, -postgres at once; test-alone measures)"
	@echo "make bench  measure speed, write benchmarks/results/"
	@echo "make bench-rubick  Rubick and its baselines on the published 406 jobs, write benchmarks/results/rubick.json"
	@echo "make compare-all  every policy on real traces and three networks: docs/comparison.md, out/compare-all.html"
	@echo "make setup  only make .venv; the command is then .venv/bin/thebes"
	@echo "make lint   ruff, pyright, import contracts, the words of documentation and comments"
	@echo "make wheel  build wheel and sdist into dist/, try the wheel in a clean environment"

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

# What is left for `make test` when the suites that need more, or take longer, are left out.
USUAL := not slow and not alone and not faults and not torch and not slurm and not ray and not postgres
PYTEST := $(BIN)/python -m pytest
# Suites that run at once: each one's output is kept back and printed whole when it ends.
SIDE_BY_SIDE := $(MAKE) --no-print-directory --keep-going --output-sync=target

# Pure tests compute, live ones mostly wait for processes: two workers for the ones and four for the others, at once.
test: kernels
	@echo "Pure and live tests run at once; each of the two tells what it found when it ends."
	@$(SIDE_BY_SIDE) -j2 test-pure test-live

test-pure: kernels
	$(PYTEST) -n 2 --dist worksteal -m "$(USUAL) and not live"

test-live: kernels
	$(PYTEST) -n 4 --dist loadfile --no-loadscope-reorder -m "$(USUAL) and live"

# Compiled before workers start, so that no two of them compile the same function.
kernels: $(READY)
	@cd tests && ../$(BIN)/python -m kit.kernels

test-slow: kernels
	$(PYTEST) -n 2 --dist loadfile -m "slow and not slurm and not ray and not postgres"

# Measures live clusters against the simulator: nothing else may run beside it.
test-alone: kernels
	$(PYTEST) -m alone

test-faults: kernels
	$(PYTEST) -n 3 --dist worksteal -m faults

test-torch: kernels torch
	$(PYTEST) -n 2 --dist worksteal -m "torch and not slurm and not ray"

# Slurm comes from Debian: slurmctld slurmd slurm-client munge iproute2. Needs root for fake GPUs and namespaces.
test-slurm: kernels
	$(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder -m "slurm and not alone"

test-ray: kernels ray
	$(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder -m ray

# PostgreSQL comes from Debian: postgresql.
test-postgres: kernels
	$(PYTEST) -n 3 --dist worksteal -m postgres

# PyTorch and Ray are large and only some suites need them.
torch: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/torch.txt

ray: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/ray.txt

# The suites beside `make test` that do not measure, two at once: most of them wait, one (slow) computes.
test-others: kernels torch ray
	@echo "Six suites run side by side; each of them tells what it found when it ends."
	@$(SIDE_BY_SIDE) -j2 test-slurm test-slow test-ray test-faults test-postgres test-torch

# Branch coverage of the rooms that decide; fails when one of them is below the bound. Compiled code cannot be measured,
# so what it does is done uncompiled, with fewer examples; the live core, and what compiles, are measured as they run.
COVERED := model policy sim live
LEAST_COVERAGE := 95
COVER := $(PYTEST) -n 2 --dist worksteal --cov --cov-report= --hypothesis-profile quick -m "$(USUAL)"
coverage: kernels
	@mkdir -p $(OUT)/coverage && rm -f $(OUT)/coverage/data*
	NUMBA_DISABLE_JIT=1 $(COVER) tests/model tests/placement tests/policy tests/sim
	$(COVER) --cov-append tests/live tests/api tests/client tests/anchors tests/cli/test_cli.py \
	  tests/instance/test_instance_config.py tests/sim/test_sim_warmup.py
	@$(BIN)/python -m coverage html --quiet --directory $(OUT)/coverage/html
	@echo "line by line: $(OUT)/coverage/html/index.html"
	@low=; for room in $(COVERED); do \
	  total=$$($(BIN)/python -m coverage report --include="src/thebes/$$room/*" --format=total --fail-under=$(LEAST_COVERAGE)) \
	    || low="$$low $$room"; \
	  echo "branch coverage of $$room: $$total %"; done; \
	  test -z "$$low" || { echo "below $(LEAST_COVERAGE) %:$$low; the page above shows which lines no test runs"; exit 1; }

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python docs/prose.py

# Builds wheel and sdist, and tries the wheel in a clean environment outside the repository.
wheel: $(READY)
	./.ci/wheel

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
