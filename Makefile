# SPDX-License-Identifier: Apache-2.0
# `make pong` and `make test` need nothing but make and a Python; `make help` lists the rest. What is
# compiled needs gRPC and a compiler, which are installed where that may be done, on Debian and Ubuntu.

PYTHON ?=  # a Python 3.11 to 3.14; when empty, the first one found
ARGS ?=    # more flags for monobeast.py or polybeast.py, or for pytest

.DEFAULT_GOAL := help
# Two targets at once would set up the same environment twice.
.NOTPARALLEL:
.PHONY: help pong poly test examples preempt faults soak hostile fuzz stress lint format build sanitize wheel \
	proto clean env dev-env

CPP := csrc/*.h csrc/*.cc csrc/fuzz/*.h csrc/fuzz/*.cc csrc/tests/*.h csrc/tests/*.cc

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1|\2/p' Makefile | while IFS='|' read -r target does; \
	do printf '%-15s %s\n' "$$target" "$$does"; done
	@echo 'Options: ARGS="..." goes on to the program or to pytest, PYTHON=... chooses the Python.'

pong: env ## learn Pong; more flags: make pong ARGS="--num_actors 4"
	exec .venv/bin/python monobeast.py --env PongNoFrameskip-v4 $(ARGS)

poly: build ## the same with PolyBeast: a learner in C++ and Python, and environment servers
	exec .venv/bin/python polybeast.py --env PongNoFrameskip-v4 $(ARGS)

test: dev-env build lint ## build, lint, the whole test suite; one file: make test ARGS=tests/test_vtrace.py
	exec .venv/bin/python -m pytest --numprocesses 2 --dist loadfile $(ARGS)

examples: dev-env build ## learn each of the examples, in half an hour; MuJoCo's if it is installed
	exec .venv/bin/python -m pytest -m long $(ARGS)

preempt: build ## kill both programs 100 times at random moments and resume them: half an hour
	exec .venv/bin/python benchmarks/preemption.py $(ARGS)

faults: dev-env build ## 45 minutes of PolyBeast among more than 500 faults; for root, with tc
	exec .venv/bin/python benchmarks/faults.py --results benchmarks/results/faults $(ARGS)

soak: dev-env build ## two hours without faults: does anything grow?
	exec .venv/bin/python benchmarks/faults.py --faults 0 --minutes 120 --results \
	benchmarks/results/soak $(ARGS)

lint: dev-env ## what the linter says
	.venv/bin/python -m ruff check .
	.venv/bin/python -m ruff format --check .
	.venv/bin/clang-format --dry-run -Werror $(CPP)

format: dev-env ## format, and mend what the linter can mend by itself
	.venv/bin/python -m ruff format .
	.venv/bin/python -m ruff check --fix .
	.venv/bin/clang-format -i $(CPP)

build: env ## compile libtorchbeast and nest in place; a moment when nothing has changed
	@.venv/bin/python setup.py -q install_packages build_ext --inplace

# Without the environment: cmake, a compiler and protobuf are enough. Thread sanitizers before gcc 14
# do not start where addresses are too random.
sanitize: ## the C++ tests: plain, then with the thread, address and undefined sanitizers
	@set -e; run=; if setarch -R true 2>/dev/null; then run='setarch -R'; fi; \
	for sanitizer in '' thread address undefined; do \
	echo "C++ tests, sanitizer: $${sanitizer:-none}"; build=build/ctest-$${sanitizer:-plain}; \
	cmake -S csrc -B $$build -DSANITIZE=$$sanitizer >/dev/null; \
	cmake --build $$build --parallel >/dev/null; \
	$$run ctest --test-dir $$build --output-on-failure; done

# As sanitize, without the environment. Where there is clang's libFuzzer, it goes on from there, led by
# what code its inputs reach; it keeps them, and what it finds, in build/libfuzzer.
fuzz: build := build/ctest-address,undefined
fuzz: ## a million malformed messages through the decoder, under sanitizers; 5 minutes
	@cmake -S csrc -B $(build) -DSANITIZE=address,undefined >/dev/null
	@cmake --build $(build) --target fuzz --parallel >/dev/null
	UBSAN_OPTIONS=abort_on_error=1:print_stacktrace=1 \
	ASAN_OPTIONS=abort_on_error=1:malloc_context_size=5:max_allocation_size_mb=64:hard_rss_limit_mb=1024 \
	$(build)/fuzz $(or $(strip $(ARGS)),1000000)
	@mkdir -p build/libfuzzer/corpus
	@set -e; function='extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long)'; \
	if ! echo "$$function { return 0; }" | \
	clang++ -fsanitize=fuzzer -x c++ - -o build/libfuzzer/is_there 2>/dev/null; then \
	echo "There is no clang++ with libFuzzer here, so that is all."; exit; fi; \
	cmake -S csrc -B build/libfuzzer -DCMAKE_CXX_COMPILER=clang++ -DSANITIZE=address,undefined \
	-DLIBFUZZER=ON >/dev/null; \
	cmake --build build/libfuzzer --target fuzz --parallel >/dev/null; \
	cd build/libfuzzer; ./fuzz -seed=1 -max_total_time=120 -max_len=100000 -malloc_limit_mb=64 \
	-rss_limit_mb=1024 corpus

stress: export STRESS_SECONDS ?= 120
stress: dev-env build ## open, use and close the core's objects in many threads; 7 minutes
	@set -e; run=; if setarch -R true 2>/dev/null; then run='setarch -R'; fi; \
	for sanitizer in thread address,undefined; do build=build/ctest-$$sanitizer; \
	echo "$$STRESS_SECONDS s, sanitizer: $$sanitizer"; \
	cmake -S csrc -B $$build -DSANITIZE=$$sanitizer >/dev/null; \
	cmake --build $$build --target stress_test --parallel >/dev/null; \
	$$run $$build/stress_test; done
	.venv/bin/python -m pytest -s tests/test_stress.py $(ARGS)

wheel: dev-env build ## a wheel with gRPC's libraries in it, for machines like this, in wheelhouse/
	rm -rf build/lib* build/bdist* build/wheel wheelhouse
	.venv/bin/python -m pip wheel --no-build-isolation --no-deps -w build/wheel .
	PATH="$(CURDIR)/.venv/bin:$$PATH" .venv/bin/auditwheel repair -w wheelhouse build/wheel/*.whl

hostile: build ## 10,000 hostile streams against live environment servers; minutes
	exec .venv/bin/python benchmarks/hostile.py $(ARGS)

proto: build ## make libtorchbeast/rpcenv_pb2.py anew, after a change of csrc/rpcenv.proto
	protoc --proto_path=csrc --python_out=libtorchbeast rpcenv.proto

clean: ## remove the virtual environment, what was built, and all caches
	rm -rf .venv .pytest_cache .ruff_cache build wheelhouse *.egg-info *.so libtorchbeast/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The virtual environment. A few milliseconds when nothing is to be done, so it is always asked for.
env: REQUIREMENTS := requirements.txt
dev-env: REQUIREMENTS := requirements-dev.txt
env dev-env: export SETUP_SCRIPT = $(value SETUP)
env dev-env:
	@sh -euc "$$SETUP_SCRIPT" setup $(REQUIREMENTS) "$(strip $(PYTHON))"

# Plain sh; make leaves it alone. The copies in .venv/.from say which requirements stand there; the
# file .venv/.incomplete lies there while we work, so that nobody takes half an environment for one.
define SETUP
requirements=$1
wanted=$2
files='requirements-env.txt requirements.txt'
[ "$requirements" = requirements.txt ] || files="$files $requirements"
fits='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))'
version='import sys; print("%d.%d" % sys.version_info[:2])'

fail() {
  printf '%s\n' "$@" >&2
  exit 1
}

# Sets $python to a fitting Python that can make environments; installs what Debian leaves out.
find_python() {
  set -- python3 python3.14 python3.13 python3.12 python3.11
  if [ -n "$wanted" ]; then set -- "$wanted"; fi
  python=
  for candidate; do
    "$candidate" -c "$fits" 2>/dev/null || continue
    python=${python:-$candidate}
    if "$candidate" -c 'import ensurepip' 2>/dev/null; then
      python=$candidate
      return
    fi
  done
  if [ -z "$python" ]; then
    tried=
    for candidate; do
      is=$("$candidate" --version 2>/dev/null) || is='not there'
      tried="$tried, $candidate ($is)"
    done
    fail "No Python from 3.11 to 3.14 found. Tried: ${tried#, }." \
      "Install one (on Debian 12, Ubuntu 24.04 or newer: apt-get install python3 python3-venv)," \
      "or name one that you have: make test PYTHON=/path/to/python3.12"
  fi

  install="apt-get install -y python$("$python" -c "$version")-venv"
  as_root=
  if [ "$(id -u)" != 0 ]; then as_root='sudo -n'; fi
  if ! command -v apt-get >/dev/null; then
    fail "$python lacks the module ensurepip, which makes virtual environments: install it."
  elif [ -n "$as_root" ] && ! $as_root true 2>/dev/null; then
    fail "$python cannot make virtual environments yet. Run this, then the same make again:" \
      "  sudo apt-get update && sudo $install"
  fi
  echo "$python cannot make virtual environments yet: $install"
  $as_root apt-get update -q || true  # one unreachable source need not matter
  $as_root env DEBIAN_FRONTEND=noninteractive $install || fail "That failed: $install"
  "$python" -c 'import ensurepip' || fail "$python still cannot: choose another with PYTHON=..."
}

usable() {
  [ ! -e .venv/.incomplete ] && .venv/bin/python -c "$fits" 2>/dev/null || return 1
  [ -z "$wanted" ] || [ "$("$python" -c "$version")" = "$(.venv/bin/python -c "$version")" ]
}

if [ -n "$wanted" ]; then find_python; fi
if usable; then
  current=yes
  for file in $files; do cmp -s "$file" ".venv/.from/$file" || current=; done
  if [ -n "$current" ]; then exit 0; fi
fi

if ! usable || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
  find_python
  if [ -e .venv ]; then echo 'The environment in .venv is not usable: making it anew.'; fi
  echo "Making a virtual environment in .venv with $("$python" --version); this takes minutes, once."
  rm -rf .venv
  mkdir .venv
  touch .venv/.incomplete
  "$python" -m venv .venv
fi
touch .venv/.incomplete
trap 'exit 130' INT  # pip's own status after Ctrl-C looks like a mere failure
status=0
.venv/bin/python -m pip install --disable-pip-version-check -r "$requirements" || status=$?
if [ "$status" != 0 ]; then
  # pip that gives up (no network, say) leaves whole packages behind; pip that is killed does not.
  if [ "$status" -le 2 ]; then rm .venv/.incomplete; fi
  fail "pip could not install $requirements: see above. The same make tries again."
fi
mkdir -p .venv/.from
cp $files .venv/.from/
rm .venv/.incomplete
endef
