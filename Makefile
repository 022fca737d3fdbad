# Everything runs in .venv, which is made on demand; versions are those of constraints.txt.

PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt
# Two worker processes with one thread each are faster than one process with two: most tests work on small tensors.
TEST_FLAGS ?= --quiet --numprocesses 2
OUT ?= out
DEMO_FLAGS ?=
DEVICE ?= cpu
# Bytecode is kept: programs and tests start hundreds of processes.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test check bench docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-7s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: .venv/.setup ## install the package with its compiled kernels into .venv
	@echo "Ready: source .venv/bin/activate"

demo: .venv/.demo ## reproduce the paper's main experiment: claims, figures and a report
	@$(BIN)/proxsps reproduce matrix-fac1 matrix-fac1-stability --out $(OUT) $(DEMO_FLAGS)
	@$(BIN)/python docs/img/overview.py $(OUT)

test: .venv/.test ## run all tests
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(TEST_FLAGS)

check: .venv/.test ## lint, format, types, import rules
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache

bench: .venv/.test ## time steps, sweeps and training; count launches and prox evaluations (DEVICE=cuda: on a GPU)
	@for name in step_time launches compile_time prox_evaluations allreduce_overhead allreduce_scaling training_loop \
			jax_step_time; do \
		echo; echo "$$name"; $(BIN)/python benchmarks/$$name.py --device $(DEVICE) || exit; \
	done
	@for name in kernel_passes step_path schedules sweep_speed; do \
		echo; echo "$$name"; $(BIN)/python benchmarks/$$name.py || exit; \
	done

docs: .venv/.test ## build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict  # --quiet would silence --strict as well
	@echo "Built site/index.html. To search in it: $(BIN)/python -m http.server --directory site"

clean: ## remove .venv and everything built
	rm -rf .venv build dist site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests examples benchmarks docs -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

.venv/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	@echo "Creating .venv ..."
	@$(PYTHON) -m venv .venv
	@touch $@

.venv/.setup: .venv/.created pyproject.toml constraints.txt
	@echo "Installing proxsps and its base dependencies ..."
	@$(INSTALL) --editable .
	@touch $@

.venv/.demo: .venv/.setup
	@echo "Installing what the experiments need ..."
	@$(INSTALL) --editable '.[experiments]'
	@touch $@

.venv/.test: .venv/.setup
	@echo "Installing what tests, checks and documentation need ..."
	@$(INSTALL) --editable '.[experiments,baselines,jax,lightning,transformers,ray,sparsity,dev,docs]'
	@touch $@
