# What maintainers and contributors need; the Makefile includes this. `make help-maintain` lists the targets.
BENCH = claims
$(foreach name,REGISTRY BASE TAG SOURCE SEED N,$(eval $(name) =))
.PHONY: bench chaos clean-venv compat compat-newest compat-oldest coverage docs first-build help-maintain image-test \
	lint lock mutant-table mutants nightly notebooks oracles push release sbom slowdowns steady test test-all verify-image

help-maintain: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' scripts/maintain.mk
	@echo '  variables: STACK=$(STACK) ARGS= OUT= BENCH= REGISTRY= BASE= IMAGE= TAG= SOURCE='

verify-image: ## build STACK twice without cache and compare the bytes
	$(call script,image.py verify --stack $(STACK) $(ARGS))

first-build: ## pull the bases, build STACK twice, test, note the digests; ARGS=--prune
	scripts/first_build $(STACK) $(ARGS)

push: ## push what make first-build tested to REGISTRY=host/path and print the digests
	$(call script,publish.py push --stack $(STACK) --registry "$(REGISTRY)" $(ARGS))

image-test: ## run the tests that need a container engine and the images; ARGS="-m slow": attacks, nightly
	$(call bootstrap,--groups train test)
	$(VENV)/bin/python -m pytest tests/container $(or $(ARGS),-m "not slow" -n 2 --dist loadgroup)

test: ## run the fast tests (minutes on 2 cores); ARGS="-k name"
	$(call bootstrap,--groups train test)
	$(VENV)/bin/python -m pytest -m "not slow and not container" $(or $(ARGS),-n auto --dist loadgroup)

coverage: ## run the fast tests, and name the lines and branches of trainer/ and scripts/ that they never reach
	$(call bootstrap,--groups train test)
	rm -rf build/coverage && mkdir -p build/coverage
	$(VENV)/bin/coverage run --branch -m pytest -n auto --dist loadgroup -m "not slow and not container" $(ARGS)
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

mutants: ## break a copy of the package in known ways: does the fast suite see each? (half an hour); ARGS="--only data"
	$(call bootstrap,--groups train test)
	$(VENV)/bin/python -m tests.mutants $(ARGS)

build/mutants/coverage.db:
	rm -rf build/coverage && mkdir -p build/coverage build/mutants
	-$(VENV)/bin/coverage run -m pytest -p tests.mutants.contexts -n auto --dist loadgroup \
		-m "not slow and not container" --junitxml=build/mutants/times.xml
	$(VENV)/bin/coverage combine -q --data-file=$@ build/coverage/data.*

# Delete build/mutants after a change of tests: it says which of them run which line.
mutant-table: build/mutants/coverage.db ## add to tests/mutants/table.jsonl which fast tests see a mutant, known or generated (hours); ARGS="--only optim"
	$(VENV)/bin/python -m tests.mutants.table $(ARGS)

steady: ## run the fast tests 10 times: quiet, beside busy processes, on one core (an hour); ARGS="--ci 1"
	$(call bootstrap,--groups train test)
	$(VENV)/bin/python -m tests.steady $(or $(ARGS),--quiet 3 --busy 5 --one-core 2)

chaos: ## cut, kill, signal and hang runs at random (about an hour, not measured anew); ARGS="--runs 5"
	$(call bootstrap,--groups train test)
	$(VENV)/bin/python -m tests.chaos $(ARGS)

nightly: ## stop and resume N random recipes from SEED on, then evaluate, verify, export (100 of them, all faults of check, and make oracles: half an hour); N=20
	$(call bootstrap,--groups train test)
	$(VENV)/bin/python -m tests.recorded.nightly $(if $(SEED),--seed $(SEED)) $(if $(N),--count $(N)) $(ARGS)
	$(if $(SEED)$(N),,$(VENV)/bin/python -m pytest tests/benchmarks/test_check_faults.py && $(MAKE) oracles)

# Their versions are those of tests/compat/oracles; no stack has them.
oracles: override STACK = tests/compat/oracles
oracles: override VENV = build/compat/oracles
oracles: ## compare language models with transformers, TRL and peft, and train SmolLM2-135M (minutes); ARGS="-k peft"
	$(call bootstrap,--groups train test oracles)
	$(VENV)/bin/python -m pytest -m oracles tests/oracles $(ARGS)

slowdowns: ## slow runs down in known ways: do they say so themselves? (half an hour, root); ARGS="--only gc"
	$(call bootstrap,--groups train test)
	$(VENV)/bin/python -m benchmarks slowdowns --out build/verdicts.md $(ARGS)

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

notebooks: ## run the notebooks, with outputs in build/notebooks, and build the site with them (minutes)
	$(call bootstrap,--groups train test docs)
	mkdir -p build/notebooks
	TRAINER_KEEP_NOTEBOOKS=$(CURDIR)/build/notebooks $(VENV)/bin/python -m pytest -m slow tests/docs/test_notebooks.py
	$(MAKE) docs

bench: ## run BENCH of benchmarks/: claims, what guides say, measured here (10 minutes; ARGS="--quick"); BENCH=--help lists them
	$(call bootstrap,--groups train bench)
	$(VENV)/bin/python -m benchmarks $(BENCH) $(ARGS)

# In an environment of its own: with a new STACK there is no lock yet, and .venv may hold another stack.
lock: override VENV = build/lock
lock: ## lock STACK, conda's half and the wheels; ARGS="--upgrade --only wheels --pool FILE"
	$(call bootstrap,--stack torch2.9-cu128 --groups boot test)
	$(VENV)/bin/python scripts/lock.py --stack $(STACK) $(ARGS)
	$(VENV)/bin/python scripts/stack_table.py

release: ## make a release of this commit in OUT=build/release, and publish nothing; TAG=v0.2.0 SOURCE=https://…
	$(call bootstrap,--groups train)
	$(VENV)/bin/python scripts/release.py $(if $(TAG),--tag "$(TAG)") $(if $(OUT),--out "$(OUT)") \
		$(if $(SOURCE),--source "$(SOURCE)") $(ARGS)

sbom: override VENV = build/lock
sbom: ## find the owner of every file of IMAGE, built on BASE="IMAGE …"; write its bill to build/sbom
	$(if $(and $(IMAGE),$(BASE)),,$(error make sbom needs IMAGE= and BASE=, names or tar files of images))
	$(call bootstrap,--stack torch2.9-cu128 --groups boot test)
	@mkdir -p build/sbom
	$(VENV)/bin/python scripts/image_files.py $(IMAGE) --base $(BASE) --stack $(STACK) \
		--sbom build/sbom/sbom.cdx.json --json build/sbom/files.json $(ARGS)

clean-venv: ## delete the environments
	rm -rf .venv build/lock build/compat
