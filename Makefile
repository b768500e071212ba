# make demo    set up, then run the main job (a few minutes)
# make test    set up, then run the tests
# make check   style
# make clean   remove the environment
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# idle OpenMP threads must sleep, not spin: two busy processes would slow each other many times over
export OMP_WAIT_POLICY := passive
export GOMP_SPINCOUNT := 0
export HF_HUB_OFFLINE := 1

.PHONY: demo test check setup clean

demo: $(READY)
	$(BIN)/tenuto demo

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

check: $(READY)
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "tenuto needs Python 3.11 or newer; $(PYTHON) is `$(PYTHON) --version`. Try make PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		if [ "`id -u`" = 0 ] && command -v apt-get >/dev/null; then \
			apt-get update -qq && apt-get install -y -qq python3-venv; \
		else \
			echo "Python's venv module is missing; on Debian: sudo apt-get install python3-venv"; exit 1; \
		fi
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (a few minutes the first time) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--editable '.[dev]' || \
		{ echo "Installing failed. If pip finds no torch==2.13.0+cpu, point PIP_EXTRA_INDEX_URL at the CPU wheel" \
		       "index named on PyTorch's installation page and run make again."; exit 1; }
	@touch $@

clean:
	rm -rf $(VENV)
