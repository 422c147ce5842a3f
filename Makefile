# SPDX-License-Identifier: Apache-2.0
# `make pong` and `make test` need nothing but make and a Python; `make help` lists the rest.
# scripts/setup.sh sets up what a target needs, and says what that is.

ARGS ?=  # more flags for monobeast.py or polybeast.py, or for pytest

.DEFAULT_GOAL := help
# Two targets at once would set up the same environment twice.
.NOTPARALLEL:
.PHONY: help pong poly quick test examples preempt elastic faults soak hostile fuzz stress lint format \
	build sanitize wheel proto clean env dev-env test-env FORCE

CPP := csrc/*.h csrc/*.cc csrc/fuzz/*.h csrc/fuzz/*.cc csrc/tests/*.h csrc/tests/*.cc
PYTEST := .venv/bin/python -m pytest
# Thread sanitizers before gcc 14 do not start where addresses are too random.
FIXED_ADDRESSES = $(shell setarch -R true 2>/dev/null && echo setarch -R)

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1|\2/p' Makefile | while IFS='|' read -r target does; \
	do printf '%-15s %s\n' "$$target" "$$does"; done
	@echo 'Options: ARGS="..." goes on to the program or to pytest; PYTHON=python3.12 chooses a Python'
	@echo 'from 3.11 to 3.14, by default the first one found.'

pong: env ## learn Pong; more flags: make pong ARGS="--num_actors 4"
	exec .venv/bin/python monobeast.py --env PongNoFrameskip-v4 $(ARGS)

poly: build ## the same with PolyBeast: a learner in C++ and Python, and environment servers
	exec .venv/bin/python polybeast.py --env PongNoFrameskip-v4 $(ARGS)

quick: dev-env ## the tests that neither compile anything nor start a whole program: under a minute
	exec $(PYTEST) -m "not long and not whole" --numprocesses 2 $(ARGS)

test: test-env build lint ## build, lint, all tests but the long ones (make examples); one file: make test ARGS=tests/test_vtrace.py
	exec $(PYTEST) --numprocesses 2 --dist loadfile --no-loadscope-reorder $(ARGS)

examples: test-env build ## learn each of the examples, and what else takes long, in half an hour; MuJoCo's if it is installed
	exec $(PYTEST) -m long $(ARGS)

preempt: build ## kill four programs 100 times each at random moments and resume them: two hours
	exec .venv/bin/python campaigns/preemption.py $(ARGS)

elastic: test-env build ## kill learners of one policy, the writer and the lighthouse, and start others: 20 minutes
	for options in '--kills 50' '--kills 10 --target writer --program polybeast' \
	'--kills 3 --target lighthouse'; do \
	.venv/bin/python campaigns/elastic.py $$options $(ARGS) || exit 1; done

faults: test-env build ## 45 minutes of PolyBeast among more than 500 faults; for root, with tc
	exec .venv/bin/python campaigns/faults.py --results campaigns/results/faults $(ARGS)

soak: test-env build ## two hours without faults: does anything grow?
	exec .venv/bin/python campaigns/faults.py --faults 0 --minutes 120 --results campaigns/results/soak \
	$(ARGS)

hostile: build ## 10,000 hostile streams against live environment servers, and against learners that listen; minutes
	set -e; for target in server learner; do \
	.venv/bin/python campaigns/hostile.py --target $$target $(ARGS); done

lint: dev-env ## what the linters say
	.venv/bin/python -m ruff check .
	.venv/bin/python -m ruff format --check .
	.venv/bin/clang-format --dry-run -Werror $(CPP)
	sh csrc/check_thread_safety.sh .venv/bin/python

format: dev-env ## format, and mend what the linter can mend by itself
	.venv/bin/python -m ruff format .
	.venv/bin/python -m ruff check --fix .
	.venv/bin/clang-format -i $(CPP)

build: ## compile libtorchbeast and nest in place; a moment when nothing has changed
	@sh scripts/setup.sh compiler
	@.venv/bin/python setup.py -q build_ext --inplace

# These need no environment: cmake, a compiler and protobuf are enough.
build/ctest-%: FORCE
	@cmake -S csrc -B $@ -DSANITIZE=$(filter-out plain,$*) >/dev/null
	@cmake --build $@ --parallel >/dev/null

sanitize: $(addprefix build/ctest-,plain thread address undefined) ## the C++ tests: plain, then with the thread, address and undefined sanitizers
	@set -e; for build in $^; do echo "C++ tests in $$build"; \
	$(FIXED_ADDRESSES) ctest --test-dir $$build --output-on-failure; done

# Where there is clang's libFuzzer, it goes on, led by what code its inputs reach. It keeps them, and
# what it finds, in build/libfuzzer.
fuzz: build/ctest-address,undefined ## a million malformed messages through the decoder, under sanitizers; 5 minutes
	UBSAN_OPTIONS=abort_on_error=1:print_stacktrace=1 \
	ASAN_OPTIONS=abort_on_error=1:malloc_context_size=5:max_allocation_size_mb=64:hard_rss_limit_mb=1024 \
	$</fuzz $(or $(strip $(ARGS)),1000000)
	@set -e; mkdir -p build/libfuzzer/corpus; cd build/libfuzzer; \
	if ! echo 'int LLVMFuzzerTestOneInput(const char* data, long size) { return 0; }' | \
	clang++ -fsanitize=fuzzer -x c - -o is_there 2>/dev/null; then \
	echo "There is no clang++ with libFuzzer here, so that is all."; exit; fi; \
	cmake -S ../../csrc -B . -DCMAKE_CXX_COMPILER=clang++ -DSANITIZE=address,undefined -DLIBFUZZER=ON \
	>/dev/null; \
	cmake --build . --target fuzz --parallel >/dev/null; \
	./fuzz -seed=1 -max_total_time=120 -max_len=100000 -malloc_limit_mb=64 -rss_limit_mb=1024 corpus

stress: export STRESS_SECONDS ?= 120
stress: test-env build build/ctest-thread build/ctest-address,undefined ## open, use and close the core's objects in many threads; 7 minutes
	@set -e; for build in $(filter build/ctest-%,$^); do echo "$$STRESS_SECONDS s in $$build"; \
	$(FIXED_ADDRESSES) $$build/stress_test; done
	$(PYTEST) -s tests/libtorchbeast/test_stress.py $(ARGS)

wheel: test-env build ## a wheel with gRPC's libraries in it, for machines like this, in wheelhouse/
	rm -rf build/lib.* build/bdist.* build/wheel wheelhouse
	.venv/bin/python -m pip wheel --no-build-isolation --no-deps -w build/wheel .
	PATH="$(CURDIR)/.venv/bin:$$PATH" .venv/bin/auditwheel repair -w wheelhouse build/wheel/*.whl

proto: build ## make libtorchbeast/rpcenv_pb2.py anew, after a change of csrc/rpcenv.proto
	protoc --proto_path=csrc --python_out=libtorchbeast rpcenv.proto

clean: ## remove the virtual environment, what was built, and all caches
	rm -rf .venv .pytest_cache .ruff_cache build wheelhouse *.egg-info *.so libtorchbeast/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

env:
	@sh scripts/setup.sh
dev-env:
	@sh scripts/setup.sh dev
test-env:
	@sh scripts/setup.sh dev compiler
