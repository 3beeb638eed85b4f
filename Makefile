# Every target sets itself up: a fresh clone needs `make demo` or `make test` and nothing before.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.docs-installed
# Workers of pytest, and the threads of each: more of both than there are cores is slower.
JOBS ?= 2
DATA ?=

# The default torch for Linux brings gigabytes of CUDA along. Without an NVIDIA card its CPU build is
# taken where pip finds one (pip's own settings say where it looks: find-links, extra-index-url), and
# the default otherwise. `make TORCH=torch` takes the default at once.
TORCH_VERSION := $(shell sed -n 's/^torch==//p' constraints.txt)
ifeq ($(shell uname -s),Linux)
ifeq ($(shell command -v nvidia-smi),)
TORCH ?= torch==$(TORCH_VERSION)+cpu
endif
endif
TORCH ?= torch
# Modules are compiled when they are first imported: most of them never are. The result is kept.
export PYTHONDONTWRITEBYTECODE =
PIP := -m pip install --quiet --disable-pip-version-check --no-compile
INSTALL := $(BIN)/python .ci/install.py -c constraints.txt
# The lowest versions that pyproject.toml allows, beside the tested ones.
LOWEST := .venv-lowest
LOWEST_STAMP := $(LOWEST)/.installed

PYTEST := $(BIN)/pytest -n $(JOBS) --dist worksteal
# The markers of the tests that `make test` runs; .ci/run takes the slow ones along.
TESTS := not slow and not benchmarks

QUICK := test_layering.py test_docs.py parts/test_attention.py parts/test_layers.py parts/test_losses.py \
	parts/test_masks.py models/test_properties.py models/test_packed.py generation/test_search.py \
	data/test_plans.py training/test_schedules.py training/test_training_parity.py cli/test_demo.py

.PHONY: help setup demo quick test test-slow test-benchmarks test-lowest fuzz bench bench-decoding \
	bench-training race experiments pages site docs docs-setup translations clean

help:
	@echo "make demo    train on dates as people write them, then translate some (three minutes)"
	@echo "make quick   lint, and properties of parts, models, search and training (a minute)"
	@echo "make test    ruff, mypy and pytest"
	@echo "make test-slow  tests that take most of a minute each: real compilers, many processes"
	@echo "make test-benchmarks  run the benchmarks on toy sizes: for a change of benchmarks/ (minutes)"
	@echo "make test-lowest  pytest with the lowest versions that pyproject.toml allows, in $(LOWEST)"
	@echo "make fuzz    600 cases of each kind of hostile input (half an hour)"
	@echo "make bench   measure, and write docs/results (DATA=FOLDER of texts: the long runs too)"
	@echo "make bench-decoding  only decoding speed, against transformers, CTranslate2 and llama.cpp"
	@echo "make bench-training  only training speed, against torch.nn.Transformer and transformers"
	@echo "make race DATA=FOLDER  heedful and other tools with the same text and time (a day);"
	@echo "             TASK=shakespeare or TASK=sst2: language models or classifiers (an hour)"
	@echo "make experiments DATA=FOLDER  compare settings with each other (hours of training)"
	@echo "make pages   write the generated pages of docs, and the table of README.md"
	@echo "make docs    make pages, then build the site in both languages and run its cells"
	@echo "make translations  add new and changed paragraphs to the catalogues in docs/locale"
	@echo "make setup   only install, into $(VENV)"
	@echo "make clean   remove $(VENV), $(LOWEST) and caches; runs/ stays"

setup: $(STAMP)

define check_python
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	|| { echo "heedful needs Python 3.11 or newer; give one: make PYTHON=python3.13"; exit 2; }
endef

$(STAMP): pyproject.toml constraints.txt
	$(check_python)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) 'pip>=25.1'  # the first with --group
	$(INSTALL) '$(TORCH)' 2>/dev/null || $(INSTALL) torch
	$(INSTALL) -e '.[all]' --group dev
	@touch $@

demo: $(STAMP)
	@$(BIN)/heedful demo --out runs/demo

# mypy has one process here, since it runs beside the tests, and its answer comes last.
test: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	@types=$$(mktemp); $(BIN)/mypy --num-workers 0 >"$$types" 2>&1 & mypy=$$!; \
	OMP_NUM_THREADS=1 $(PYTEST) -m '$(TESTS)' --durations=10; \
	tests=$$?; wait $$mypy; mypy=$$?; cat "$$types"; rm -f "$$types"; exit $$((tests || mypy))

# What takes most of a minute each; in .ci/run, not in `make test`.
test-slow: $(STAMP)
	OMP_NUM_THREADS=1 $(PYTEST) -m slow --durations=10

# For a change of benchmarks/ or of what they call, and tests that take minutes; not in .ci/run.
test-benchmarks: $(STAMP)
	OMP_NUM_THREADS=1 $(PYTEST) -m benchmarks --durations=10

# Needs Python 3.11: some of the lowest versions have no wheels for later ones.
test-lowest: $(LOWEST_STAMP)
	OMP_NUM_THREADS=1 $(LOWEST)/bin/pytest -n $(JOBS) --dist worksteal \
		-m 'not slow and not benchmarks'

$(LOWEST_STAMP): pyproject.toml tests/support/lowest_versions.py
	$(check_python)
	test -x $(LOWEST)/bin/python || $(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python tests/support/lowest_versions.py > $(LOWEST)/requirements.txt
	$(LOWEST)/bin/python $(PIP) -r $(LOWEST)/requirements.txt -e .
	@touch $@

# For while one works; `make test` is for every change.
quick: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --hypothesis-profile=quick $(addprefix tests/,$(QUICK))

fuzz: $(STAMP)
	HEEDFUL_FUZZ=600 OMP_NUM_THREADS=1 $(PYTEST) --timeout 3600 tests/cli/test_hostile_input.py \
		tests/serve/test_fuzz.py

# Needs an otherwise idle machine: the figures are times.
bench: $(STAMP)
	$(INSTALL) --group bench
	$(BIN)/python benchmarks/parameters.py
	$(BIN)/python benchmarks/choices.py
	$(BIN)/python benchmarks/synthetic.py
	$(BIN)/python benchmarks/preparation.py
	$(BIN)/python benchmarks/plan.py
	$(BIN)/python benchmarks/bulk.py
	$(BIN)/python benchmarks/training_speed.py
	$(BIN)/python benchmarks/shared_cores.py
	$(BIN)/python benchmarks/decoding.py
	$(BIN)/python benchmarks/command.py
	$(BIN)/python benchmarks/encoding.py
	$(BIN)/python benchmarks/long_texts.py
	$(BIN)/python benchmarks/serving.py
	$(BIN)/python benchmarks/beside_long.py
ifneq ($(DATA),)
	$(BIN)/python benchmarks/multi30k.py --data '$(DATA)/multi30k'
	$(BIN)/python benchmarks/tatoeba.py --data '$(DATA)/tatoeba'
	$(BIN)/python benchmarks/shakespeare.py --data '$(DATA)/tinyshakespeare'
	$(BIN)/python benchmarks/sst2.py --data '$(DATA)/sst2'
	$(BIN)/python benchmarks/bands.py --data '$(DATA)'
	$(BIN)/python benchmarks/localization.py --data '$(DATA)/libreoffice'
endif

bench-decoding: $(STAMP)
	$(INSTALL) --group bench
	$(BIN)/python benchmarks/decoding.py

bench-training: $(STAMP)
	$(INSTALL) --group bench
	$(BIN)/python benchmarks/training_speed.py

# Other tools are installed into runs/race/environments, one environment each. Systems that have
# finished are not repeated; a part of a race: benchmarks/race.py --help. The page keeps the races of
# other tasks.
TASK ?= multi30k,libreoffice
TRANSLATORS := joeynmt,eole,opennmt-py,sockeye,fairseq
race: $(STAMP)
	$(INSTALL) psutil
	$(BIN)/python benchmarks/race.py --data '$(DATA)' --tasks '$(TASK)' --systems all \
		$(if $(findstring multi30k,$(TASK)),--install $(TRANSLATORS))

# Comparisons of settings with each other, hours of training; more rows: experiments/ablation.py --help.
experiments: $(STAMP)
	$(BIN)/python experiments/ablation.py translation --data '$(DATA)/multi30k' --rows shipped adam
	$(BIN)/python experiments/denoising.py --data '$(DATA)/multi30k'
	$(BIN)/python experiments/back_translation.py --data '$(DATA)/multi30k'
	$(BIN)/python experiments/many_to_many.py --corpus 'en-de=$(DATA)/multi30k' 'en-zh=$(DATA)/tatoeba'
	$(BIN)/python experiments/lora.py --data '$(DATA)'

# Pages in the repository that programs write.
pages: $(STAMP)
	$(BIN)/python docs/make_cli.py
	$(BIN)/python docs/make_recipe.py
	$(BIN)/python docs/make_formats.py
	$(BIN)/python docs/make_backends.py
	$(BIN)/python docs/make_backend_options.py
	$(BIN)/python docs/make_adapters.py
	$(BIN)/python docs/make_readme_table.py

# The site: docs/_build/en and docs/_build/zh.
docs: pages site

site: $(DOCS_STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python docs/make_site.py

docs-setup: $(DOCS_STAMP)

$(DOCS_STAMP): $(STAMP)
	$(INSTALL) --group docs
	@touch $@

translations: $(DOCS_STAMP)
	$(BIN)/python docs/make_translations.py

clean:
	rm -rf $(VENV) $(LOWEST) build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests benchmarks docs -name __pycache__ -type d -prune -exec rm -rf {} +
