# `make help` lists the targets. The variables below are set on the command line: make train RECIPE=…
# Two of them may stand in .env, which Compose reads too (.env.example).
# NAME=value, quoted or not, is what make and Compose read alike. Another line that names them is refused, and so are values
# of several lines, in which they might stand: read-env gives NAME=value, or the numbers of such lines.
read-env = LC_ALL=C awk '{ sub(/\r$$/, "") } /^(\377\376|\376\377)/ { print NR; exit } \
	/^(STACK|RUNTIME)=("[A-Za-z0-9._\/-]*"|\047[A-Za-z0-9._\/-]*\047|[A-Za-z0-9._\/-]*)[ \t]*$$/ { gsub(/["\047 \t]/, ""); print; next } \
	/^(\357\273\277)?[ \t]*(export[ \t]+)?(STACK|RUNTIME)[ \t]*([=:]|$$)/ { print NR } \
	/^[^=:]*[=:][ \t]*("[^"]*|\047[^\047]*)$$/ { print NR }' .env || echo 1
env-lines := $(if $(wildcard .env),$(shell $(read-env)))
odd-env := $(firstword $(filter-out STACK=% RUNTIME=%,$(env-lines)))
$(if $(odd-env),$(error .env: line $(odd-env): make and Compose may read it differently: write STACK=name and RUNTIME=name \
	with nothing else on the line, other values on one line each, in a file of UTF-8 without a BOM))
from-env = $(patsubst $(1)=%,%,$(lastword $(filter $(1)=%,$(env-lines))))
# As Compose does it: what the environment has goes before .env, and an empty one is none.
env-or-file = $(or $(if $(filter environment,$(origin $(1))),$($(1))),$(call from-env,$(1)),$(2))
RECIPE  = digits
GPUS    =
OUT     =
RESUME  =
ARGS    =
STACK   := $(call env-or-file,STACK,torch2.9-cu128)
GROUPS  = train
PYTHON  =
RUNTIME := $(call env-or-file,RUNTIME,auto)
IMAGE   =
DATA    =
BENCH   = claims
REGISTRY =
RUN     = runs
BASE    =
FROM    =
TORCH   =
DRIVER  =
TAG     =
SOURCE  =
KEY     =
ADVISORIES =
SEED    =
N       =
VENV    = .venv

# The first of these that runs and is in range; a pyenv shim can be on PATH and fail. The environment's own
# Python comes first, so that PYTHON=… need not be repeated.
PYTHONS := python3 python3.13 python3.12 python3.11 python3.10
CHECK   := import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))
# $(call bootstrap,ARGUMENTS): makes or updates an environment; at once if there is nothing to do.
find-python = for python in $(or $(PYTHON),$(VENV)/bin/python $(PYTHONS)); do \
		"$$python" -c '$(CHECK)' 2>/dev/null && break; python=; done;
bootstrap = @$(find-python) "$${python:-$(or $(PYTHON),python3)}" scripts/bootstrap.py --stack $(STACK) --venv $(VENV) $(1)

# $(call script,SCRIPT ARGUMENTS): runs a script that needs no environment; it prints what it runs.
script = @$(find-python) python=$${python:-$(or $(PYTHON),python3)}; \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 9))' 2>/dev/null || { echo 'make: no Python from 3.9 on \
	here: name one with PYTHON=…, or use docker compose run --rm train $(RECIPE), which needs none' >&2; exit 2; }; \
	"$$python" scripts/$(1)
# What scripts/runtime.py is told by every target.
where = --stack $(STACK) $(if $(IMAGE),--image $(IMAGE)) $(if $(DATA),--data "$(DATA)")

.DEFAULT_GOAL := help
.PHONY: help train doctor mutants steady image verify-image first-build push shell up down image-test test coverage compat compat-oldest compat-newest test-all \
	chaos nightly oracles slowdowns lint docs bench profile verify tensorboard venv lock stack release audit sbom clean-venv

help: ## list the targets and variables
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile
	@echo '  variables: RECIPE=$(RECIPE) GPUS= OUT= ARGS= STACK=$(STACK) PYTHON= GROUPS= RUN='
	@echo '  container: RUNTIME=$(RUNTIME) (auto, local, container) IMAGE= DATA=folder outside this one REGISTRY='

train: ## train RECIPE; GPUS=2 or GPUS=0,1, OUT=folder, RESUME=1, ARGS="--set data.micro_batch_size=64"
	$(call script,runtime.py train --runtime $(RUNTIME) $(where) --venv $(VENV) $(if $(GPUS),--gpus $(GPUS)) \
		-- $(RECIPE) $(if $(OUT),--out "$(OUT)") $(if $(RESUME),--resume $(if $(OUT),auto,newest)) $(ARGS))

doctor: ## say what is wrong with this machine, and with the image's container on it; ARGS="digits --json"
	$(call bootstrap,--groups train)
	$(call script,doctor.py $(where) --venv $(VENV) -- $(ARGS))

image: ## build the images of STACK, train and dev
	$(call script,image.py build --stack $(STACK) --target train $(ARGS))
	$(call script,image.py build --stack $(STACK) --target dev $(ARGS))

verify-image: ## build STACK twice without cache and compare the bytes
	$(call script,image.py verify --stack $(STACK) $(ARGS))

first-build: ## pull the bases, build STACK twice, test, write docs/results/image.md, leave a log; ADVISORIES=FILE ARGS=--prune
	$(call script,first_build.py --stack $(STACK) $(if $(ADVISORIES),--advisories "$(ADVISORIES)") $(ARGS))

push: ## push what make first-build tested to REGISTRY=host/path and print the digests
	$(call script,publish.py push --stack $(STACK) --registry "$(REGISTRY)" $(ARGS))

shell: ## open a shell in the image; ARGS="command" runs that instead
	$(call script,runtime.py shell $(where) -- $(ARGS))

up: ## start JupyterLab and TensorBoard in the image; JUPYTER_PORT=8888 TENSORBOARD_PORT=6006
	$(call script,runtime.py up $(where) -- $(ARGS))

down: ## stop them, and what docker compose run left; caches stay
	$(call script,runtime.py down -- $(ARGS))

image-test: ## run the tests that need a container engine and the images; ARGS="-k name"
	$(call bootstrap,--groups train test)
	$(VENV)/bin/python -m pytest tests/container $(or $(ARGS),-n 2 --dist loadgroup)

test: ## run the fast tests (minutes on 2 cores); ARGS="-k name"
	$(call bootstrap,--groups train test)
	$(VENV)/bin/python -m pytest -m "not slow and not container" $(or $(ARGS),-n auto --dist loadgroup)

coverage: ## run the fast tests, and name the lines and branches of trainer/ and scripts/ that they never reach
	$(call bootstrap,--groups train test)
	rm -rf build/coverage && mkdir -p build/coverage
	$(VENV)/bin/coverage run -m pytest -n auto --dist loadgroup -m "not slow and not container" $(ARGS)
	$(VENV)/bin/coverage combine -q && $(VENV)/bin/coverage report

# In environments of their own, each from a hash-checked lock: the torch of the conda stacks, and the newest.
compat: compat-oldest compat-newest ## run the tests marked compat on torch 2.5.1 and 2.14.1; ARGS="-k name"

compat-oldest: override STACK = tests/compat/torch2.5
compat-newest: override STACK = torch2.14-cu130
compat-oldest compat-newest: override VENV = build/compat/$(notdir $(STACK))
compat-oldest compat-newest:
	$(call bootstrap,--groups train test)
	$(VENV)/bin/python -m pytest -m compat $(or $(ARGS),-n auto --dist loadgroup)

test-all: ## run every test, with many more random examples; containers need an engine and images
	$(call bootstrap,--groups train test)
	$(VENV)/bin/python -m pytest --hypothesis-profile=many $(or $(ARGS),-n auto --dist loadgroup)

mutants: ## break a copy of the package in known ways: does the fast suite see each? (minutes); ARGS="--only data"
	$(call bootstrap,--groups train test)
	$(VENV)/bin/python -m tests.mutants $(if $(OUT),--out "$(OUT)") $(ARGS)

steady: ## run the fast tests 10 times: quiet, beside busy processes, on one core (an hour); OUT=docs/results/page.md
	$(call bootstrap,--groups train test)
	$(VENV)/bin/python -m tests.steady $(or $(ARGS),--quiet 3 --busy 5 --one-core 2) $(if $(OUT),--out "$(OUT)")

chaos: ## cut, kill, signal and hang runs at random (about an hour); ARGS="--kills 20"
	$(call bootstrap,--groups train test)
	$(VENV)/bin/python -m tests.chaos $(ARGS)

nightly: ## stop and resume N random recipes from SEED on, then evaluate, verify, export (100 of them, and make oracles: half an hour); N=20
	$(call bootstrap,--groups train test)
	$(VENV)/bin/python -m tests.recorded.nightly $(if $(SEED),--seed $(SEED)) $(if $(N),--count $(N)) $(ARGS)
	$(if $(SEED)$(N),,$(MAKE) oracles)

# Their versions are those of tests/compat/oracles; no stack has them.
oracles: override STACK = tests/compat/oracles
oracles: override VENV = build/compat/oracles
oracles: ## compare language models with transformers, TRL and peft, and train SmolLM2-135M (minutes); ARGS="-k peft"
	$(call bootstrap,--groups train test oracles)
	$(VENV)/bin/python -m pytest -m oracles tests/oracles $(ARGS)

slowdowns: ## slow runs down in known ways: do they say so themselves? (half an hour, root); ARGS="--only gc"
	$(call bootstrap,--groups train test)
	$(VENV)/bin/python -m tests.slowdowns --out docs/results/verdicts.md $(ARGS)

schema = $(VENV)/bin/check-jsonschema --quiet --builtin-schema vendor
lint: ## check style, types, what imports what, spelling, shell files, the Dockerfile and .github
	$(call bootstrap,--groups train test)
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy --strict
	$(VENV)/bin/lint-imports --no-logo --no-cache
	PATH="$(VENV)/bin:$$PATH" shellcheck $$(find . \( -name .git -o -name .venv -o -name build -o -name runs -o -name '*.j2' \) -prune -o \
		-type f -exec awk 'FNR == 1 && /^#!.*[ \/](ba|da)?sh( |$$)/ {print FILENAME} {nextfile}' {} +)
	$(VENV)/bin/hadolint Dockerfile
	$(VENV)/bin/codespell
	$(schema).github-workflows .github/workflows/*.yml
	$(schema).github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	$(schema).dependabot .github/dependabot.yml
	$(schema).github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(schema).compose-spec docker-compose.yml scripts/compose/gpu.yml
	$(schema).citation-file-format CITATION.cff
	$(VENV)/bin/zizmor --offline --no-progress --quiet .github

# Strict: a link that leads nowhere fails.
docs: ## build the documentation as a site, in build/docs; ARGS=--serve shows it on 127.0.0.1:8000
	$(call bootstrap,--groups train docs)
	$(VENV)/bin/python scripts/reference.py
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs $(if $(filter --serve,$(ARGS)),serve,build --strict --quiet)
	@echo "docs: build/docs/index.html"

bench: ## run BENCH of benchmarks/: claims, what guides say, measured here (10 minutes; ARGS="--quick"); BENCH=--help lists them
	$(call bootstrap,--groups train bench)
	$(VENV)/bin/python -m benchmarks $(BENCH) $(ARGS)

# Two tools can't listen to a GPU at once: under nsys the run leaves only ranges.
profile: ## look at some steps of RECIPE: with Nsight Systems where nsys and a GPU are, else torch's profiler; OUT=folder
	$(call bootstrap,--groups train)
	@mkdir -p build
	if command -v nsys && nvidia-smi -L; then \
		nsys profile --trace=cuda,nvtx,cudnn,cublas,osrt --capture-range=cudaProfilerApi --capture-range-end=stop \
			--force-overwrite=true --output=build/profile $(VENV)/bin/trainer train $(RECIPE) $(if $(OUT),--out "$(OUT)") --nvtx $(ARGS); \
	else $(VENV)/bin/trainer train $(RECIPE) $(if $(OUT),--out "$(OUT)") --profile $(ARGS); fi

verify: ## train RUN=runs/mine again and compare the bits; ARGS="--steps 200"
	$(call bootstrap,--groups train)
	$(VENV)/bin/trainer verify $(RUN) $(ARGS)

tensorboard: ## show the runs under RUN=runs on this machine's port 6006
	$(call bootstrap,--groups train)
	$(VENV)/bin/python scripts/tensorboard_once.py --logdir $(RUN) --host 127.0.0.1 $(ARGS)

venv: ## only make or update the environment; GROUPS="train dev test bench docs"
	$(call bootstrap,--groups $(GROUPS))

# In an environment of its own: with a new STACK there is no lock yet, and .venv may hold another stack.
lock: override VENV = build/lock
lock: ## lock STACK, conda's half and the wheels; ARGS="--upgrade --only wheels --pool FILE"
	$(call bootstrap,--stack torch2.9-cu128 --groups boot test)
	$(VENV)/bin/python scripts/lock.py --stack $(STACK) $(ARGS)
	$(VENV)/bin/python scripts/stack_table.py

# From a stack of wheels; a CUDA that no stack has needs DRIVER=native,floor.
stack: override VENV = build/lock
stack: ## make a stack with another torch, FROM=torch2.9-cu128 TORCH=2.14.1, and test both; ARGS=--no-tests
	$(if $(and $(FROM),$(TORCH)),,$(error make stack needs FROM=, a folder of stacks/, and TORCH=, a version))
	$(call bootstrap,--stack torch2.9-cu128 --groups boot test)
	$(VENV)/bin/python scripts/new_stack.py --base "$(FROM)" --torch "$(TORCH)" $(if $(DRIVER),--driver "$(DRIVER)") $(ARGS)

release: ## make a release of this commit in OUT=build/release, and publish nothing; TAG=v0.2.0 SOURCE=https://… KEY=file
	$(call bootstrap,--groups train)
	$(VENV)/bin/python scripts/release.py $(if $(TAG),--tag "$(TAG)") $(if $(OUT),--out "$(OUT)") \
		$(if $(SOURCE),--source "$(SOURCE)") $(if $(KEY),--key "$(KEY)") $(ARGS)

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
