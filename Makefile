# `make help` lists what users need, `make help-maintain` the rest (scripts/maintain.mk). Variables are set on the command
# line: make train RECIPE=…; STACK may also stand in the environment. make reads no .env: that is Compose's.
RECIPE  = digits
GROUPS  = train
RUN     = runs
VENV    = .venv
$(foreach name,GPUS OUT RESUME ARGS PYTHON IMAGE DATA,$(eval $(name) =))
given := $(STACK)
override STACK := $(or $(STACK),torch2.9-cu128)
$(if $(given),,$(if $(filter-out help up down shell,$(MAKECMDGOALS)),$(if $(shell grep -s '^STACK=.' .env), \
	$(warning .env: make takes STACK from its command line or the environment alone))))

# The first of these that runs and is in range; a pyenv shim can be on PATH and fail. The environment's own
# Python comes first, so that PYTHON=… need not be repeated.
PYTHONS := python3 python3.13 python3.12 python3.11 python3.10
CHECK   := import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))
find-python = for python in $(or $(PYTHON),$(VENV)/bin/python $(PYTHONS)); do \
		"$$python" -c '$(CHECK)' 2>/dev/null && break; python=; done;
bootstrap = @$(find-python) "$${python:-$(or $(PYTHON),python3)}" scripts/bootstrap.py --stack $(STACK) --venv $(VENV) $(1)

# $(call script,SCRIPT ARGUMENTS): runs a script that needs no environment; it prints what it runs.
script = @$(find-python) python=$${python:-$(or $(PYTHON),python3)}; \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 9))' 2>/dev/null || { echo 'make: no Python from 3.9 on \
	here: name one with PYTHON=…, or use docker compose run --rm train $(RECIPE), which needs none' >&2; exit 2; }; \
	"$$python" scripts/$(1)

.DEFAULT_GOAL := help
.PHONY: help train doctor verify profile tensorboard venv image up down shell

help: ## list these targets, and the variables
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile
	@echo '  variables: RECIPE=$(RECIPE) GPUS= OUT= ARGS= STACK=$(STACK) PYTHON= GROUPS= RUN='
	@echo '  container: IMAGE= DATA=folder outside this one (make shell)'
	@echo '  make help-maintain lists what maintainers need'

train: ## train RECIPE in .venv; GPUS=2 or GPUS=0,1, OUT=folder, RESUME=1, ARGS="--set data.micro_batch_size=64"
	$(if $(IMAGE)$(DATA)$(filter container,$(RUNTIME)),$(error make train trains in $(VENV); in the image: docker compose run --rm train $(RECIPE), \
		or make shell ARGS="trainer train $(RECIPE)"))
	$(call bootstrap,--groups train)
	$(VENV)/bin/trainer train $(RECIPE) $(if $(GPUS),--gpus $(GPUS)) $(if $(OUT),--out "$(OUT)") \
		$(if $(RESUME),--resume $(if $(OUT),auto,newest)) $(ARGS)

doctor: ## say what is wrong with this machine; ARGS="digits --json". In a container: make shell ARGS="trainer doctor"
	$(call bootstrap,--groups train)
	$(VENV)/bin/trainer doctor $(ARGS)

verify: ## train RUN=runs/mine again and compare the bits; ARGS="--steps 200"
	$(call bootstrap,--groups train)
	$(VENV)/bin/trainer verify $(RUN) $(ARGS)

# Two tools can't listen to a GPU at once: under nsys the run leaves only ranges.
profile: ## look at some steps of RECIPE: with Nsight Systems where nsys and a GPU are, else torch's profiler; OUT=folder
	$(call bootstrap,--groups train)
	@mkdir -p build
	if command -v nsys && nvidia-smi -L; then \
		nsys profile --trace=cuda,nvtx,cudnn,cublas,osrt --capture-range=cudaProfilerApi --capture-range-end=stop \
			--force-overwrite=true --output=build/profile $(VENV)/bin/trainer train $(RECIPE) $(if $(OUT),--out "$(OUT)") --nvtx $(ARGS); \
	else $(VENV)/bin/trainer train $(RECIPE) $(if $(OUT),--out "$(OUT)") --profile $(ARGS); fi

tensorboard: ## show the runs under RUN=runs on this machine's port 6006
	$(call bootstrap,--groups train)
	$(VENV)/bin/python scripts/tensorboard_once.py --logdir $(RUN) --host 127.0.0.1 $(ARGS)

venv: ## only make or update the environment; GROUPS="train dev test bench docs"
	$(call bootstrap,--groups $(GROUPS))

image: ## build the images of STACK, train and dev
	$(call script,image.py build --stack $(STACK) --target train $(ARGS))
	$(call script,image.py build --stack $(STACK) --target dev $(ARGS))

up: ## start JupyterLab and TensorBoard in the image, with the GPUs; JUPYTER_PORT=8888 TENSORBOARD_PORT=6006
	$(call script,runtime.py up --stack "$(given)" $(if $(IMAGE),--image $(IMAGE)) -- $(ARGS))

down: ## stop them, and what docker compose run left; caches stay
	$(call script,runtime.py down -- $(ARGS))

shell: ## open a shell in the image; ARGS="command" runs that instead
	$(call script,runtime.py shell --stack "$(given)" $(if $(IMAGE),--image $(IMAGE)) $(if $(DATA),--data "$(DATA)") -- $(ARGS))

include scripts/maintain.mk
