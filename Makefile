# Two commands do everything on a fresh machine: `make demo` and `make test`.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# SGLang pins other versions of much that we use, so its tests have an environment of their own.
SGLANG_CPU   := tests/support/sglang_cpu
SGLANG_VENV  := .venv-sglang
SGLANG_BIN   := $(SGLANG_VENV)/bin
SGLANG_STAMP := $(SGLANG_VENV)/.installed

# The packages that modelexpress is compared with; one of them has the same import name.
PEERS_VENV  := .venv-peers
PEERS_STAMP := $(PEERS_VENV)/.installed

.PHONY: help setup setup-sglang demo test test-sglang test-sglang-fleet fuzz faults soak check bench bench-peers format clean

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

setup: $(STAMP)  ## Create .venv with everything that tests, checks and benchmarks need

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[nixl,redis,bench,dev]'
	@# The trained weights for the demo; the package's own dependencies are not needed to read them.
	$(BIN)/python -m pip install --quiet --no-deps silero-vad==6.2.3
	touch $(STAMP)

setup-sglang: $(SGLANG_STAMP)  ## Create .venv-sglang: the smallest real SGLang that serves on a CPU

# pip has to compile: with PYTHONDONTWRITEBYTECODE set, every server would compile SGLang's 5,200 files anew.
$(SGLANG_STAMP): pyproject.toml constraints.txt $(wildcard $(SGLANG_CPU)/*.txt) $(SGLANG_CPU)/pyproject.toml
	test -x $(SGLANG_BIN)/python || $(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_BIN)/python -m pip install --quiet --compile --constraint constraints.txt \
		--requirement $(SGLANG_CPU)/requirements.txt --editable '.[nixl,redis]' --editable $(SGLANG_CPU)
	$(SGLANG_BIN)/python -m pip install --quiet --compile --no-deps --requirement $(SGLANG_CPU)/requirements-no-deps.txt
	touch $(SGLANG_STAMP)

demo: $(STAMP)  ## Load real weights by disk, from a peer, and with the peer killed mid-read
	$(BIN)/python benchmarks/demo.py

test: $(STAMP) redis-server  ## Run every test, those on the real SGLang last
	$(BIN)/python -m pytest --ignore tests/sglang
	$(MAKE) test-sglang

test-sglang: $(SGLANG_STAMP) redis-server  ## Run the tests on the real SGLang alone
	env -u PYTHONDONTWRITEBYTECODE $(SGLANG_BIN)/python -m pytest tests/sglang -m "not fleet"

test-sglang-fleet: $(SGLANG_STAMP)  ## Compare whole servers, four for each kind of model: takes half an hour
	env -u PYTHONDONTWRITEBYTECODE $(SGLANG_BIN)/python -m pytest tests/sglang -m fleet

N ?= 2000
fuzz: $(STAMP) redis-server  ## Try N hostile inputs on every border (make fuzz N=100000; 2000 are three minutes)
	FUZZ_EXAMPLES=$(N) $(BIN)/python -m pytest tests/fuzz --timeout 0

LOADS ?= 1000
soak: $(STAMP) redis-server  ## LOADS loads in one process, every second one with a failure; 50 readers of one source
	SOAK_LOADS=$(LOADS) $(BIN)/python -m pytest tests/soak -s --timeout 0

# FAULT_RUNS and FAULT_SEED: N of fuzz has another default.
faults: $(STAMP) redis-server  ## Make N runs among real processes in which something goes wrong (make faults N=200; SEED=17 makes one again)
	FAULT_SEED=$(or $(SEED),0) FAULT_RUNS=$(if $(SEED),1,$(if $(filter command,$(word 1,$(origin N))),$(N),30)) \
		$(BIN)/python -m pytest tests/faults$(if $(SEED),/test_faults.py::test_a_fault_costs_an_error_at_most)

check: $(STAMP)  ## Lint, formatting, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP) redis-server  ## Measure everything in short: rows, plots and benchmarks/results/summary.json, in ten minutes
	$(BIN)/python benchmarks/start_up.py
	$(BIN)/python benchmarks/scale.py --rounds 3
	$(BIN)/python benchmarks/fleet.py --seeds 3
	$(BIN)/python benchmarks/load_latency.py --rounds 3
	$(BIN)/python benchmarks/transfer_throughput.py --pairs 3
	$(BIN)/python benchmarks/disk_throughput.py --pairs 3
	$(BIN)/python benchmarks/retry_peak_memory.py --pairs 2
	$(BIN)/python benchmarks/gms_import.py
	$(BIN)/python benchmarks/gms_publish_peak.py
	$(BIN)/python benchmarks/plots.py

$(PEERS_STAMP): benchmarks/peers/requirements.txt constraints.txt
	test -x $(PEERS_VENV)/bin/python || $(PYTHON) -m venv $(PEERS_VENV)
	$(PEERS_VENV)/bin/python -m pip install --quiet --constraint constraints.txt \
		--requirement benchmarks/peers/requirements.txt
	touch $(PEERS_STAMP)

bench-peers: $(STAMP) $(PEERS_STAMP)  ## Measure modelexpress beside the packages that do the same, on the same bytes
	$(BIN)/python benchmarks/disk_throughput.py
	$(BIN)/python benchmarks/peer_throughput.py
	$(BIN)/python benchmarks/plots.py

format: $(STAMP)  ## Format the code
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

.PHONY: redis-server
redis-server:
	@{ command -v redis-server && command -v openssl; } >/dev/null || tests/support/install_redis.sh

clean:  ## Remove what was built and generated
	rm -rf $(VENV) $(SGLANG_VENV) $(PEERS_VENV) .sglang-models .sglang-releases demo-data build dist *.egg-info
