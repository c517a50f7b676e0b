# Two commands set everything up on a fresh machine with Python >= 3.11 and pip:  make demo   make test
#
# Which PyTorch: TORCH names the wheel, TORCH_INDEX the index that serves it, e.g.
#   make test TORCH_INDEX=https://download.pytorch.org/whl/cpu       (CPU build)
#   make demo TORCH=torch TORCH_INDEX=https://download.pytorch.org/whl/cu130   (CUDA build)
PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
BIN := .venv/bin

.PHONY: demo test test-all check docs clean

demo: .venv/.installed
	$(BIN)/fathom compare recipes/demo.yaml
	@echo "Open runs/demo/report.html in a browser. For the command in this shell: source $(BIN)/activate"

test: .venv/.tests-installed
	HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

test-all: ARGS += -m ""
test-all: test

check: .venv/.tests-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/.tests-installed
	$(BIN)/python docs/site/build.py

.venv/bin/python:
	$(PYTHON) -m venv .venv

# torch first and by exact version: left to the resolver, pip fetches a CUDA build of several GB
.venv/.installed: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet $(TORCH) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(BIN)/python -m pip install --quiet -e .
	touch $@

.venv/.tests-installed: .venv/.installed
	$(BIN)/python -m pip install --quiet -e ".[test,check,docs]"
	touch $@

clean:
	rm -rf .venv build runs .pytest_cache .mypy_cache .ruff_cache
