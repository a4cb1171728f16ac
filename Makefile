# make tune   set up, fetch the small model, run the main job, print the result
# make test   set up, check, pass every test
PYTHON ?= python3
VENV ?= .venv
SPACE ?= tune_spaces/verify.yaml
ARGS ?=
JOBS ?= 2
STRICT ?=
BIN := $(VENV)/bin
COMPILE := $(BIN)/uv pip compile -q --no-annotate --no-header

.PHONY: setup tune test lint types tests locks lock audit ui serve clean

setup: $(VENV)/.ready

$(VENV)/.ready: requirements/cpu.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -r requirements/cpu.lock
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

tune: setup
	$(BIN)/python -m pipeline.tune $(SPACE) $(ARGS)

test: setup lint types locks audit tests

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types:
	$(BIN)/mypy

tests:
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations 10 \
		--cov --cov-report=term:skip-covered --cov-fail-under=85 $(ARGS)

# Both locked groups still resolve to what is locked; the second is never installed here.
locks: setup
	$(COMPILE) pyproject.toml --extra embedded --extra dev --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
		-c requirements/cpu.lock -o $(VENV)/cpu.lock && diff requirements/cpu.lock $(VENV)/cpu.lock
	$(COMPILE) pyproject.toml --extra sglang --python-version 3.12 --python-platform x86_64-manylinux_2_39 \
		-c requirements/sglang.lock -o $(VENV)/sglang.lock && diff requirements/sglang.lock $(VENV)/sglang.lock

lock: setup
	echo "torch==2.13.0" > $(VENV)/pins
	$(COMPILE) -U pyproject.toml --extra embedded --extra dev --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
		-c $(VENV)/pins -o requirements/cpu.lock
	$(COMPILE) -U pyproject.toml --extra sglang --python-version 3.12 --python-platform x86_64-manylinux_2_39 \
		-o requirements/sglang.lock

# Pins, withdrawn releases, licences; known vulnerabilities where OSV can be reached. STRICT=--strict: or fail.
audit: setup
	$(BIN)/python requirements/audit.py $(STRICT)

ui: setup
	$(BIN)/python -m pipeline.ui

serve: setup
	$(BIN)/python -m serve $(ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .coverage*
