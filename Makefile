# Everything runs from .venv, which the first target that needs it sets up. PYTHON may be 3.11 or 3.12.
PYTHON ?= python3
VENV := .venv
MODE ?= inflight
INSTALLED := $(VENV)/.installed

# Compute threads that spin while they wait slow their neighbours many times over; see the README on threads.
export OMP_WAIT_POLICY ?= PASSIVE
export TOKENIZERS_PARALLELISM ?= false
export HF_HUB_OFFLINE ?= 1

.PHONY: demo serve test test-slow lint clean

demo: $(INSTALLED)
	$(VENV)/bin/noria demo

serve: $(INSTALLED)
	$(VENV)/bin/noria serve --mode $(MODE) $(ARGS)

test: $(INSTALLED)
	$(VENV)/bin/python -m pytest -m "not slow"

test-slow: $(INSTALLED)
	$(VENV)/bin/python -m pytest -m slow

lint: $(INSTALLED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

clean:
	rm -rf $(VENV)

# The lock is complete, so nothing is resolved: what is installed is what was tested.
$(INSTALLED): requirements.lock pyproject.toml $(wildcard backend_src/noria/kernels/cpu/*.*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' || \
		{ echo "PYTHON must be Python 3.11 or 3.12, for which requirements.lock was made; $(PYTHON) is not"; exit 1; }
	@echo "setting up $(VENV): about two minutes and 2.5 GB, once"
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --disable-pip-version-check --no-deps -r requirements.lock
	@# where pip took a torch for GPUs, that needs CUDA's libraries, gigabytes, which no lock for CPUs names
	$(VENV)/bin/python -c 'import torch' 2> /dev/null || \
		$(VENV)/bin/pip install --quiet --disable-pip-version-check -c requirements.lock torch
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@
