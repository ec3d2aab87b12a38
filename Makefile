# The course's commands. Each one first makes or repairs .venv; that costs nothing when it is right.
#
# PYTHON=python3.12 make lab   chooses the interpreter (3.10 or newer); .venv is made anew if needed
# PIP_EXTRA_INDEX_URL          on Linux pip takes torch's CUDA build, several gigabytes; the CPU
#                              index that PyTorch's install page names brings the small build

PYTHON ?=
LAB_ARGS ?=
LESSON ?=
SCREENSHOTS ?= screenshots
BIN := .venv/bin
INTERPRETER := $(or $(PYTHON),python3)
LINT := $(BIN)/ruff check . && $(BIN)/ruff format --check .
NBVAL := --nbval --nbval-current-env --nbval-cell-timeout=240 --nbval-sanitize-with=tests/nbval.cfg

.DEFAULT_GOAL := help
.PHONY: help setup lab test lessons bench lint browser pins clean

help: ## show this list
	@sed -n 's/^# \{0,1\}//p' Makefile
	@sed -n 's/^\([a-z]*\):.*## /make \1|/p' Makefile | awk -F'|' '{printf "%-14s %s\n", $$1, $$2}'

setup: ## make or repair .venv, nothing else
	@command -v $(INTERPRETER) >/dev/null || { echo "[set-up] stopped: there is no $(INTERPRETER);" \
		"name one of 3.10 or newer, for example PYTHON=python3.12 make test"; exit 1; }
	@$(INTERPRETER) tools/setup.py $(if $(PYTHON),--mine)

lab: setup ## open JupyterLab at the list of lessons (LAB_ARGS="--no-browser --port=8890")
	@$(BIN)/python -m jupyterlab --ip=127.0.0.1 $(LAB_ARGS) \
		--LabApp.default_url=/lab/tree/notebooks/index.ipynb

test: setup ## lint, pytest and every lesson compared with its stored outputs
	@failed=""; \
	{ $(LINT); } || failed="$$failed lint"; \
	$(BIN)/python -m pytest || failed="$$failed pytest"; \
	if ls notebooks/[0-9]*.ipynb >/dev/null 2>&1; then \
		$(BIN)/python -m pytest $(NBVAL) notebooks || failed="$$failed lessons"; \
	fi; \
	if [ -n "$$failed" ]; then echo "make test: failed in$$failed"; exit 1; fi

lessons: setup ## run the lessons again and store their outputs (LESSON=01 for one)
	@$(BIN)/python tools/lessons.py $(LESSON)

bench: setup ## our collectives and strategies beside torch's own, timed in one run
	@$(BIN)/python -m benchmarks

lint: setup ## ruff: rules and formatting, notebooks included
	@$(LINT)

browser: setup ## run every lesson in JupyterLab in headless Chromium (SCREENSHOTS=folder)
	@SCREENSHOTS="$(SCREENSHOTS)" $(BIN)/python -m pytest tests/browser -m browser -rs

pins: setup ## bring constraints.txt up to date with pyproject.toml
	@$(BIN)/python -m pip install --quiet uv
	@$(BIN)/uv pip compile pyproject.toml --universal --python-version 3.10 --all-extras --upgrade \
		--no-annotate --no-emit-index-url --no-python-downloads --quiet \
		--custom-compile-command "make pins" --output-file constraints.txt

clean: ## remove .venv and everything else that git does not keep
	@rm -rf .venv .setup.lock .pytest_cache .ruff_cache screenshots *.egg-info notebooks/.ipynb_checkpoints
	@find s2s_lib tests tools benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
