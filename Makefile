# Everything a newcomer needs: each target sets up .venv by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# That, and what tests, lint, notebooks and trackers need.
DEV := $(VENV)/.dev-installed
SGLANG := $(VENV)/.sglang-installed
# make demo ENGINE=sglang or ENGINE=embedded; without it, SGLang if it is installed and there are GPUs.
ENGINE ?=
# CPU runs use one thread a process: the processes are many and the cores few.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help install install-dev install-sglang demo show opd-vs-rl tutorials test test-all chaos lint docs docs-generated bench gpu clean

help:
	@echo "make demo    train a tiny teacher, then distil it into a student at T = 0.7 (installs first; minutes)"
	@echo "make show    a recipe with tools, games or documents: TASK=tools|rl_tools|selfplay|condensed"
	@echo "make opd-vs-rl  optimizer steps that OPD and GRPO need, by answer length: LENGTHS=4,16,48,128 (long)"
	@echo "make tutorials  notebooks in a browser: one temperature, an environment of your own, RL's settings, SFT to OPD"
	@echo "make test    lint, types and the tests; make test-all adds the slow ones (chaos, clusters)"
	@echo "make test-newest, test-oldest, test-cuda: learner, engine, plugin, pushes with other versions of libraries"
	@echo "make docs    the pages as a site, in build/site; fails where a link leads nowhere (make lint does it)"
	@echo "make chaos   kills every kind of actor at random; shows that nothing is lost (long)"
	@echo "make bench   tokens per second of every stage, and of TRL side by side"
	@echo "make gpu     checks a machine with a CUDA GPU in half an hour (elsewhere: says what it would do)"
	@echo "make install only set up $(VENV); make install-sglang adds SGLang, make install-dev what tests need"

install: $(STAMP)
install-dev: $(DEV)

# SGLang on CUDA pins another torch than the tests run with: what is there need not be replaced.
CONSTRAINTS := $(if $(shell command -v nvidia-smi),constraints-cuda.txt,constraints.txt)

PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check

# Python 3.11's own pip takes 30 s of CPU more to choose versions. A module is compiled when it is first
# imported: most never are, and pip would compile all of them, on one core. Where Python writes no
# bytecode, each process would compile what it imports again.
COMPILE := $(if $(PYTHONDONTWRITEBYTECODE),--compile,--no-compile)
$(STAMP): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "isotherm needs Python 3.11 or newer"'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing torch, ray, transformers and what they need into $(VENV): a minute or two"
	@$(PIP_INSTALL) --upgrade pip
	@$(PIP_INSTALL) $(COMPILE) -c $(CONSTRAINTS) -e .
	@touch $@

$(DEV): $(STAMP)
	$(PIP_INSTALL) -c $(CONSTRAINTS) -e '.[dev]'
	touch $@

# SGLang pins a CUDA build of torch. Without CUDA, requirements/README.md says what this does.
install-sglang: $(SGLANG)

$(SGLANG): $(STAMP) requirements/sglang-cpu.txt
	@if command -v nvidia-smi >/dev/null; then \
		$(PIP_INSTALL) -c $(CONSTRAINTS) -e '.[sglang]'; \
	elif [ "$$(uname -sm)" = "Linux x86_64" ]; then \
		$(PIP_INSTALL) --no-deps -r requirements/sglang-cpu.txt; \
	else echo "no SGLang for $$(uname -sm): the embedded engine is used, tests of SGLang are skipped"; \
	fi
	@touch $@

demo: $(STAMP) $(if $(filter sglang,$(ENGINE)),$(SGLANG))
	$(BIN)/python -m cluster.demo out=outputs/demo $(if $(ENGINE),engine=$(ENGINE))

show: $(STAMP)
	$(BIN)/python -m examples.show task=$(or $(TASK),tools) out=outputs/show $(if $(ENGINE),engine=$(ENGINE))

opd-vs-rl: $(DEV)
	$(BIN)/python -m examples.opd_vs_rl out=outputs/opd-vs-rl $(if $(LENGTHS),lengths=$(LENGTHS))

tutorials: $(DEV)
	$(BIN)/python -m marimo edit tutorials

lint: docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tests.docstring_lint
	$(BIN)/pyright
	$(BIN)/pyright -p tests

# A copy of the pages with the repository's own layout: one set of relative links serves both.
docs: $(DEV)
	rm -rf build/docs build/site && mkdir -p build/docs
	git ls-files '*.md' tutorials examples/configs | grep -v ^tests/ | xargs cp --parents -t build/docs
	$(BIN)/zensical build --strict -f mkdocs.yml

# docs/settings.md and docs/metrics.md, from the code; a test compares them.
docs-generated: $(DEV)
	$(BIN)/python -m tests.generated_docs

# Two files at a time: most tests wait for processes of their own. A file's tests share servers.
test: lint $(SGLANG)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=25 -m "not slow"

# One file after the other: each has clusters of its own.
test-all: test
	$(BIN)/python -m tests.slow_tier

# What needs no SGLang, with other versions, in an environment of its own; not in CI: the newest and the
# oldest that pyproject.toml allows, and those of a CUDA machine (CUDA's torch computes on a CPU as well).
test-newest: VERSIONS := --resolution highest
test-oldest: VERSIONS := --resolution lowest-direct
test-cuda: VERSIONS := -c constraints-cuda.txt
test-newest test-oldest test-cuda: test-%:
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install -qq uv
	.venv-$*/bin/uv pip install -q --python .venv-$*/bin/python $(VERSIONS) -r pyproject.toml --extra data
	.venv-$*/bin/uv pip install -q --python .venv-$*/bin/python anyio pytest hypothesis
	.venv-$*/bin/python -m pytest -m "not slow" tests/learner tests/distill tests/actors/test_embedded_engine.py \
		tests/actors/test_sglang_plugin.py tests/actors/test_weight_portions.py tests/cluster/test_weights.py \
		tests/cluster/test_ipc.py tests/cluster/test_push_check.py tests/cluster/test_push_model.py

chaos: $(DEV) $(SGLANG)
	$(BIN)/python -m tests.chaos $(if $(SEED),seed=$(SEED)) $(if $(STRIKES),strikes=$(STRIKES))

bench: $(DEV) .venv-peer/.installed
	$(BIN)/python -m benchmarks out=outputs/bench

# With SGLang where it is installed; device=cpu size=tiny runs the same checks without a GPU.
gpu: $(DEV)
	$(BIN)/python -m benchmarks.gpu out=outputs/gpu

# The peer lives apart: its dependencies are its own.
.venv-peer/.installed: benchmarks/peer-requirements.txt
	test -x .venv-peer/bin/python || $(PYTHON) -m venv .venv-peer
	.venv-peer/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

clean:
	rm -rf $(VENV) .venv-peer outputs build *.egg-info
