# make demo: the page on this machine.  make test: lint and every test.  Both install what they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint format bench clean

demo: $(VENV)/.runtime
	$(BIN)/python app.py

# A worker per core, each on one thread (tests/conftest.py).
test: $(VENV)/.dev lint
	$(BIN)/python -m pytest -n logical --maxprocesses 4 --dist worksteal

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Speed and memory on this machine; never part of the tests.
bench: $(VENV)/.runtime
	$(BIN)/python -m benchmarks frames

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "QuantWM needs Python 3.11 or newer; $(PYTHON) is older. Try: make PYTHON=python3.12 ..."; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: $(BIN)/python requirements.txt constraints.txt
	$(BIN)/python -m pip install --disable-pip-version-check -r requirements.txt
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime requirements-dev.txt requirements-training.txt
	$(BIN)/python -m pip install --disable-pip-version-check -r requirements-dev.txt
	@touch $@

clean:
	rm -rf $(VENV) runs build
