# `make help` lists the targets. The variables below are set on the command line: make train RECIPE=…
RECIPE  = digits
GPUS    =
OUT     =
RESUME  =
ARGS    =
STACK   = torch2.9-cu128
GROUPS  = train
PYTHON  =
RUNTIME = auto
RUN     = runs
IMAGE   =
BASE    =
ADVISORIES =
VENV    = .venv

# The first of these that runs and is in range; a pyenv shim can be on PATH and fail. The environment's own
# Python comes first, so that PYTHON=… need not be repeated.
PYTHONS := python3 python3.13 python3.12 python3.11 python3.10
CHECK   := import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))
# $(call bootstrap,ARGUMENTS): makes or updates an environment; at once if there is nothing to do.
bootstrap = @for python in $(or $(PYTHON),$(VENV)/bin/python $(PYTHONS)); do \
		"$$python" -c '$(CHECK)' 2>/dev/null && break; python=; done; \
	"$${python:-$(or $(PYTHON),python3)}" scripts/bootstrap.py --stack $(STACK) --venv $(VENV) $(1)

# For the recipes that train: empty, or the end with one line.
runtime = $(if $(filter auto local,$(RUNTIME)),,$(error $(if $(filter container,$(RUNTIME)),RUNTIME=container \
	comes with the image; use RUNTIME=local,RUNTIME is auto, local or container, not '$(RUNTIME)')))

.DEFAULT_GOAL := help
.PHONY: help train test compat compat-oldest compat-newest test-all chaos lint bench tensorboard venv lock audit sbom clean-venv

help: ## list the targets and variables
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile
	@echo '  variables: RECIPE=$(RECIPE) GPUS= OUT= ARGS= STACK=$(STACK) PYTHON= RUNTIME=$(RUNTIME) GROUPS= RUN='

train: ## train RECIPE; GPUS=2 or GPUS=0,1, OUT=folder, RESUME=1, ARGS="--set data.micro_batch=64"
	$(runtime)$(call bootstrap,--groups train)
	$(VENV)/bin/trainer $(strip train $(RECIPE) $(if $(GPUS),--gpus $(GPUS)) $(if $(OUT),--out "$(OUT)") \
		$(if $(RESUME),--resume $(if $(OUT),auto,newest)) $(ARGS))

test: ## run the fast tests (minutes on 2 cores); ARGS="-k name"
	$(call bootstrap,--groups train test)
	$(VENV)/bin/python -m pytest -m "not slow" $(ARGS)

# In environments of their own, each from a hash-checked lock: the torch of the conda stacks, and the newest.
compat: compat-oldest compat-newest ## run the tests marked compat on torch 2.5.1 and 2.14.1; ARGS="-k name"

compat-oldest: override STACK = tests/compat/torch2.5
compat-newest: override STACK = torch2.14-cu130
compat-oldest compat-newest: override VENV = build/compat/$(notdir $(STACK))
compat-oldest compat-newest:
	$(call bootstrap,--groups train test)
	$(VENV)/bin/python -m pytest -m compat $(ARGS)

test-all: ## run every test
	$(call bootstrap,--groups train test)
	$(VENV)/bin/python -m pytest $(ARGS)

chaos: ## cut, kill and signal runs at random (up to 20 minutes); ARGS="--kills 20"
	$(call bootstrap,--groups train test)
	$(VENV)/bin/python -m tests.chaos $(ARGS)

lint: ## check style, types and shell files
	$(call bootstrap,--groups train test)
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy --strict
	PATH="$(VENV)/bin:$$PATH" shellcheck $$(find . \( -name .git -o -name .venv -o -name build -o -name runs \) -prune -o \
		-type f -exec awk 'FNR == 1 && /^#!.*[ \/](ba|da)?sh( |$$)/ {print FILENAME} {nextfile}' {} +)

bench: ## measure the overhead per step over a hand-written loop
	$(call bootstrap,--groups train)
	$(VENV)/bin/trainer bench overhead $(ARGS)

tensorboard: ## show the runs under RUN=runs on this machine's port 6006
	$(call bootstrap,--groups train)
	$(VENV)/bin/tensorboard --logdir $(RUN) --host 127.0.0.1 $(ARGS)

venv: ## only make or update the environment; GROUPS="train dev test bench"
	$(call bootstrap,--groups $(GROUPS))

# In an environment of its own: with a new STACK there is no lock yet, and .venv may hold another stack.
lock: override VENV = build/lock
lock: ## lock STACK, conda's half and the wheels; ARGS="--upgrade --only wheels --pool FILE"
	$(call bootstrap,--stack torch2.9-cu128 --groups boot test)
	$(VENV)/bin/python scripts/lock.py --stack $(STACK) $(ARGS)

audit sbom: override VENV = build/lock
audit: ## match the locks of STACK with ADVISORIES=FILE (JSON list of OSV records), except for stacks/waivers.toml
	$(call bootstrap,--stack torch2.9-cu128 --groups boot test)
	$(VENV)/bin/python scripts/audit.py $(STACK) $(if $(ADVISORIES),--advisories "$(ADVISORIES)") $(ARGS)

sbom: ## find the owner of every file of IMAGE, built on BASE="IMAGE …"; write its bill to build/sbom
	$(if $(and $(IMAGE),$(BASE)),,$(error make sbom needs IMAGE= and BASE=, names or tar files of images))
	$(call bootstrap,--stack torch2.9-cu128 --groups boot test)
	@mkdir -p build/sbom
	$(VENV)/bin/python scripts/image_files.py $(IMAGE) --base $(BASE) --stack $(STACK) \
		--sbom build/sbom/sbom.cdx.json --json build/sbom/files.json $(ARGS)

clean-venv: ## delete the environments
	rm -rf .venv build/lock build/compat
