# Two commands do everything on a fresh machine: `make demo` and `make test`.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: help setup demo test check bench format clean

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP)  ## Create .venv with everything that tests, checks and benchmarks need

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[nixl,redis,bench,dev]'
	@# The trained weights for the demo; the package's own dependencies are not needed to read them.
	$(BIN)/python -m pip install --quiet --no-deps silero-vad==6.2.3
	touch $(STAMP)

demo: $(STAMP)  ## Load real weights by disk, from a peer, and with the peer killed mid-read
	$(BIN)/python benchmarks/demo.py

test: $(STAMP) redis-server  ## Run every test
	$(BIN)/python -m pytest

check: $(STAMP)  ## Lint, formatting, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)  ## Measure peak memory of a retry and a publication, import time, the work before a byte moves
	$(BIN)/python benchmarks/control_work.py
	$(BIN)/python benchmarks/retry_peak_memory.py
	$(BIN)/python benchmarks/gms_publish_peak.py
	$(BIN)/python benchmarks/gms_import.py

format: $(STAMP)  ## Format the code
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

.PHONY: redis-server
redis-server:
	@{ command -v redis-server && command -v openssl; } >/dev/null || tests/support/install_redis.sh

clean:  ## Remove what was built and generated
	rm -rf $(VENV) demo-data build dist *.egg-info
