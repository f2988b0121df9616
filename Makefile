PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
export FLWR_TELEMETRY_ENABLED := 0
export FLWR_DISABLE_UPDATE_CHECK := 1

.PHONY: install demo test test-slow test-long test-containers test-newest lint structure audit

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

demo: install
	rm -rf runs/demo
	$(BIN)/fedopt launch --clients 20 --processes 5 --set output.directory=runs/demo

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

structure: install
	$(BIN)/python tests/structure.py

# a release with known vulnerabilities: where it passes for clean, the service knows of none
KNOWN_BAD := requests==2.19.0
audit: install
	$(BIN)/bandit --quiet --recursive fedopt_flwr server_app client_app
	@if echo $(KNOWN_BAD) | $(BIN)/pip-audit --no-deps --disable-pip --progress-spinner off -r /dev/stdin 2>&1 \
	| grep -qE 'CVE|GHSA|PYSEC'; then $(BIN)/pip-audit --local --skip-editable; \
	else echo 'pip-audit: not run: the vulnerability service of the package index cannot be reached' \
	'from here (it does not know those of $(KNOWN_BAD)); run `make audit` where it can be'; fi

# in which xdist sends its workers the names of folders
test test-slow test-long test-newest: export PYTHONIOENCODING := utf-8

test: lint
	$(BIN)/pytest -n 2 -m "not slow and not containers"

test-slow: install
	$(BIN)/pytest -n 2 -m "slow and not long"

# by hand: what the slow suite shows for some rules, for all of them
test-long: install
	$(BIN)/pytest -n 2 -m long

# as root, where dockerd, debootstrap, iptables and prometheus are installed; else they skip
test-containers: install
	$(BIN)/pytest -m containers tests/containers

# the newest Flower that pyproject.toml allows, in an environment of its own
NEWEST := .venv-newest/bin
test-newest:
	test -x $(NEWEST)/python || $(PYTHON) -m venv .venv-newest
	$(NEWEST)/python -m pip install --quiet --upgrade pip
	grep '^torch' constraints.txt > .venv-newest/constraints.txt
	$(NEWEST)/python -m pip install --quiet -c .venv-newest/constraints.txt -e '.[dev]'
	$(NEWEST)/python -m pip show flwr | grep Version
	$(NEWEST)/pytest -n 2 -m "not slow and not containers"
	$(NEWEST)/pytest -m slow tests/flower -k "superlink or supernode or template"
