# Development commands. `make help` lists them; `make demo` and `make test` set up all they need.
.DEFAULT_GOAL := help
# The builds share one folder of object files.
.NOTPARALLEL:

PYTHON ?= python3
ifeq ($(origin CXX),default)
CXX := c++
endif
# More arguments for pytest, for example: make test PYTEST_ARGS="-x -k values"
PYTEST_ARGS ?=
# Arguments for the benchmarks, for example: make bench BENCH_ARGS="--rows '128x128'"
BENCH_ARGS ?=

TORCH := 2.13.0
LATEST_TORCH := 2.14.1
LATEST_TORCHVISION := 0.29.1
OLDEST_TORCH := 2.10.0
PIP := python -m pip --disable-pip-version-check

KERNEL_SOURCES := setup.py pyproject.toml $(wildcard csrc/*/*)
PACKAGE_SOURCES := $(shell find deformc -name '*.py') README.md LICENSE
CREATED := .venv/created-$(TORCH)
LATEST_CREATED := .venv-latest/created-$(LATEST_TORCH)
OLDEST_CREATED := .venv-oldest/created-$(OLDEST_TORCH)
SANITIZED_LIBRARY := build/sanitize/deformc/libdeformc.so
# What runs kernels rather than fake ones or compilers.
SANITIZE_TESTS ?= $(addprefix tests/test_,values.py gradients.py errors.py property.py numerics.py threads.py ms_deform_attn.py)

.PHONY: help demo test test-latest test-oldest bench bench-latest lint format sanitize wheel clean

help:  ## list the commands
	@sed -n 's/^\([a-z-]*\):.*##/\1:/p' Makefile | awk -F': *' '{ printf "make %-13s %s\n", $$1, $$2 }'

demo: .venv/demo  ## a photograph through a deformable ResNet-50, eager, compiled, exported, AOTInductor
	.venv/bin/python examples/demo.py

test: .venv/installed  ## the whole test suite, on the CPU and on a simulated GPU
	.venv/bin/python -m pytest $(PYTEST_ARGS)
	$(call simulated,mps) .venv/bin/python -m pytest -n 2 -m "not slow" $(PYTEST_ARGS)

test-latest: .venv-latest/installed  ## the suite on the same library binary with the latest torch and torchvision
	@.venv-latest/bin/python -c 'import torchvision'  # without it, the comparison with it would be skipped
	$(call test_wheel,.venv-latest)

test-oldest: .venv-oldest/installed  ## the suite on the same library binary with the oldest supported torch
	$(call test_wheel,.venv-oldest)

bench: .venv/bench  ## the benchmarks; every row is verified before it is timed
	.venv/bin/python -m benchmarks $(BENCH_ARGS)

bench-latest: .venv/installed .venv-latest/bench  ## the benchmarks with the latest torch, torchvision included
	.venv-latest/bin/python -m benchmarks $(BENCH_ARGS)

lint: .venv/lint  ## ruff check and ruff format --check
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

format: .venv/lint  ## ruff's fixes and formatting, in place
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

# Python itself is not instrumented, so the sanitizers' runtimes are preloaded, and libstdc++ with them: the address
# sanitizer looks up __cxa_throw when it starts. Leaks are not looked for: the interpreter's own would drown ours.
# --capture=sys: a sanitizer's report goes past Python to the terminal and is not lost with the process.
sanitize: .venv/installed $(SANITIZED_LIBRARY)  ## CPU tests on a library built with ASan and UBSan (Linux, GCC)
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so) \
	$$($(CXX) -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0:detect_odr_violation=0 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 \
	DEFORMC_LIBRARY=$(CURDIR)/$(SANITIZED_LIBRARY) \
	.venv/bin/python -m pytest --capture=sys $(SANITIZE_TESTS) $(PYTEST_ARGS)

wheel: dist/built  ## the wheel of this platform, in dist/
	@ls dist/*.whl

clean:  ## remove what was built; the environments .venv* stay
	rm -rf build dist deformc.egg-info deformc/*.so deformc/*.dylib .pytest_cache .ruff_cache .hypothesis
	rm -f .venv*/installed .venv*/demo .venv*/bench
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

# $(1): folder, $(2): what to install with pip before anything else
define create_venv
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	echo "error: deformc needs Python >= 3.10; name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -m venv $(1) || { rm -rf $(1); \
	echo "error: '$(PYTHON) -m venv' failed. On Debian and Ubuntu: apt-get install python3-venv python3-dev." \
	"Or name another interpreter: make PYTHON=/path/to/python3" >&2; exit 1; }
	$(1)/bin/$(PIP) install $(2)
	touch $@
endef

# The kernels of a GPU, on a simulated one. $(1): its device type in torch.
define simulated
	DEFORMC_SIMULATE=$(1) DEFORMC_TEST_DEVICES=$(1)
endef

# The tests run from a folder outside the source tree, so that they and their child processes import the installed
# package. $(1): environment
define test_wheel
	mkdir -p build/elsewhere
	cd build/elsewhere && DEFORMC_WHEEL="$$(echo $(CURDIR)/dist/*.whl)" \
	$(CURDIR)/$(1)/bin/pytest -c $(CURDIR)/pyproject.toml --rootdir=$(CURDIR) $(CURDIR)/tests $(PYTEST_ARGS)
endef

define install_wheel
	$(1)/bin/$(PIP) install --force-reinstall --no-deps dist/*.whl
	$(1)/bin/$(PIP) install "$$(echo dist/*.whl)[test]"
	touch $@
endef

$(CREATED):
	@command -v $(CXX) >/dev/null || { \
	echo "error: no C++ compiler ($(CXX)). On Debian and Ubuntu: apt-get install g++" >&2; exit 1; }
	$(call create_venv,.venv,torch==$(TORCH) "setuptools>=77" wheel ninja)

$(LATEST_CREATED):
	$(call create_venv,.venv-latest,torch==$(LATEST_TORCH) torchvision==$(LATEST_TORCHVISION))

$(OLDEST_CREATED):
	$(call create_venv,.venv-oldest,torch==$(OLDEST_TORCH))

# The build links anew but compiles only what changed.
.venv/installed: $(CREATED) $(KERNEL_SOURCES)
	rm -f deformc/libdeformc.*
	.venv/bin/$(PIP) install --no-build-isolation -e ".[test]"
	touch $@

.venv/lint: $(CREATED) pyproject.toml
	.venv/bin/$(PIP) install "ruff>=0.17,<0.18"
	touch $@

.venv/demo: .venv/installed
	.venv/bin/$(PIP) install --no-build-isolation -e ".[demo]"
	touch $@

.venv/bench: .venv/installed
	.venv/bin/$(PIP) install --no-build-isolation -e ".[bench]"
	touch $@

# Files left in build/lib* by an earlier build would get into the wheel.
dist/built: $(CREATED) $(KERNEL_SOURCES) $(PACKAGE_SOURCES)
	rm -rf dist build/lib* build/bdist*
	.venv/bin/$(PIP) wheel --no-build-isolation --no-deps --wheel-dir dist .
	touch $@

.venv-latest/installed: $(LATEST_CREATED) dist/built
	$(call install_wheel,.venv-latest)

.venv-latest/bench: .venv-latest/installed
	.venv-latest/bin/$(PIP) install "$$(echo dist/*.whl)[bench]"
	touch $@

.venv-oldest/installed: $(OLDEST_CREATED) dist/built
	$(call install_wheel,.venv-oldest)

$(SANITIZED_LIBRARY): $(CREATED) $(KERNEL_SOURCES)
	rm -f $@
	DEFORMC_SANITIZE=1 .venv/bin/python setup.py -q build_ext --build-lib build/sanitize --build-temp build/sanitize-objects
