# Needs Python 3.10+ and make; everything else is installed into .venv.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

INTERPRETED_TRITON ?= triton==3.6.0

# Tests are shared out among so many processes of one thread each.
WORKERS ?= 2
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

# Sums as a CPU without AVX makes them: torch's own kernels, MKL's and oneDNN's.
OTHER_ARITHMETIC = ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 ONEDNN_MAX_CPU_ISA=SSE41

.PHONY: demo test slow test-all test-other-arithmetic test-lowest interpreter lint types notebooks benchmarks clean

## Train a small residual CNN 2:4 sparse on real images, with a TensorBoard log and a checkpoint in runs/.
demo: .venv/.demo
	$(BIN)/lightning-nm fit -c configs/digits-bi-mask.yaml

## Run the test suite.
test: .venv/.dev
	$(PYTEST)

## Run the tests that take longer.
slow: .venv/.dev
	$(PYTEST) -m slow

## Run both in one go.
test-all: .venv/.dev
	$(PYTEST) -m 'not gpu'

## Run the test suite in the arithmetic of an old CPU: no test may ask for the bits of this one.
test-other-arithmetic: .venv/.dev
	$(OTHER_ARITHMETIC) $(PYTEST)

## Run the test suite on the lowest versions that pyproject.toml allows, in .venv-lowest (6 GB: PyPI's torch has CUDA).
test-lowest: BIN := .venv-lowest/bin
test-lowest: .venv-lowest/.dev
	$(PYTEST)

## Run the Triton kernels in Triton's interpreter, then compile them for an H100: needs no GPU.
interpreter: .venv/.interpreter
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -q tests/kernels
	$(BIN)/python -m pytest -q -m slow tests/kernels

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.dev
	$(BIN)/mypy

## Execute every notebook.
notebooks: .venv/.dev
	$(BIN)/python -m pytest -q -p no:cacheprovider --nbmake --nbmake-timeout=120 notebooks

benchmarks: .venv/.dev
	$(BIN)/python -m benchmarks.masks
	$(BIN)/python -m benchmarks.permutation
	$(BIN)/python -m benchmarks.transposable
	$(BIN)/python -m benchmarks.estimators
	$(BIN)/python -m benchmarks.step_overhead

# torch goes first: the constraint selects one build of it before anything can ask for another.
.venv/.torch: constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) torch
	@touch $@

.venv/.demo: .venv/.torch pyproject.toml
	$(PIP) -e '.[demo]'
	@touch $@

.venv/.dev: .venv/.torch pyproject.toml
	$(PIP) -e '.[dev]'
	@touch $@

.venv-lowest/.dev: constraints-lowest.txt pyproject.toml
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-lowest.txt -e '.[dev]'
	@touch $@

# A CUDA build of torch has brought its own Triton, which stays.
.venv/.interpreter: .venv/.dev
	$(BIN)/python -c "import triton" 2>/dev/null || $(PIP) --no-deps $(INTERPRETED_TRITON)
	@touch $@

clean:
	rm -rf .venv .venv-lowest runs lightning_logs .pytest_cache .mypy_cache .ruff_cache .hypothesis
