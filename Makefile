# `make demo` and `make test` need Python 3.12 or 3.13, make and a package index; nothing else.

VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt

.PHONY: demo test lint venv
.DELETE_ON_ERROR:

# Answers three prompts with the packaged model nano.
demo: $(VENV)/.core
	$(BIN)/deepinfer demo

# The whole default test suite.
test: $(VENV)/.dev
	$(BIN)/python -m pytest

# Style, formatting and types.
lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# Everything that work on the package needs.
venv: $(VENV)/.dev

# A stamp is older than these files exactly when what was installed may no longer match them.
STALE := pyproject.toml constraints.txt scripts/create_venv.sh scripts/find_python.sh

$(VENV)/.core: $(STALE)
	@sh scripts/create_venv.sh $(VENV)
	@echo "Installing deepinfer-jax into $(VENV) (a minute or more)"
	@$(INSTALL) -e .
	@touch $@

$(VENV)/.dev: $(STALE)
	@sh scripts/create_venv.sh $(VENV)
	@echo "Installing deepinfer-jax with its development tools into $(VENV) (a minute or more)"
	@$(INSTALL) -e '.[dev]'
	@touch $(VENV)/.core $@
