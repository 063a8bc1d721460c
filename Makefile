# doctab: `make demo` shows the line from text to a model card; `make test` runs the tests.
# Everything runs in .venv, which `make setup` creates from requirements.txt and constraints.txt.

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed
CORPUS ?=
OUT    ?= $(if $(filter paper,$(MAKECMDGOALS)),paper,study)
JOBS   ?= 1
UNTIL  ?= confirmation
GROUPS ?=
YES    ?=
STUDY_OPTIONS = --out $(OUT) --jobs $(JOBS) --until $(UNTIL) \
  $(if $(GROUPS),--groups $(GROUPS)) $(if $(YES),--yes)

.PHONY: setup demo study paper test test-all lint bench clean help

help:
	@echo "make setup     create .venv with everything that the targets below need"
	@echo "make demo      chunk set, four small arms, scores, table, figure, card: 8 minutes, 2 cores"
	@echo "make study     the core arms on Python's source; CORPUS=DIR: every arm on your documents"
	@echo "make paper     the whole paper, from the Hub's data; it says what it takes and asks"
	@echo "make test      the default tests, under 10 minutes with the install"
	@echo "make test-all  slow, multi-process and version-matrix tests"
	@echo "make lint      ruff, mypy and the pre-commit hooks"
	@echo "make bench     the CPU benchmarks (benchmarks/README.md)"

setup: $(STAMP)

$(STAMP): requirements.txt constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else \
	  f"error: doctab needs Python 3.11 or newer; $(PYTHON) is {v[0]}.{v[1]}. Run: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (torch is the largest part)"
	@$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -r requirements.txt \
	  || { echo "error: pip could not install the packages above; check the network and try again"; exit 1; }
	@touch $(STAMP)

demo: setup
	@$(PY) -m training.line demo

study: setup
	@$(PY) -m training.study training/studies/$(if $(CORPUS),documents,stdlib).yaml \
	  $(if $(CORPUS),--corpus $(CORPUS)) $(STUDY_OPTIONS)

paper: setup
	@$(PY) -m training.study training/studies/paper.yaml $(STUDY_OPTIONS)

test: setup
	$(PY) -m pytest

test-all: setup
	$(PY) -m pytest -m "slow or multi_process or versions"

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

bench: setup
	$(PY) -m benchmarks

clean:
	rm -rf demo .pytest_cache .mypy_cache .ruff_cache
