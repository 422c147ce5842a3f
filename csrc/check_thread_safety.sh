#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Have clang check that members are used under the mutex that guards them (mutex.h), and that it
# refuses a file that breaks this rule. Argument: the Python of an environment with
# requirements-dev.txt, whose clang-tidy this is: few machines have clang++.
set -eu
python=${1:-.venv/bin/python}
for tool in protoc grpc_cpp_plugin; do
  if ! command -v $tool >/dev/null; then
    echo "There is no $tool here: the check of thread safety is left out."
    exit 0
  fi
done
tidy=$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')/clang-tidy
pybind11=$("$python" -c 'import pybind11; print(pybind11.get_include())')
headers=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
cd "$(dirname "$0")"
generated=$(mktemp -d)
trap 'rm -rf "$generated"' EXIT
protoc --cpp_out="$generated" --grpc_out="$generated" \
  --plugin=protoc-gen-grpc="$(command -v grpc_cpp_plugin)" rpcenv.proto

# Files by standard input, several at a time. No check but the compiler's own warning.
check() {
  xargs -P "$(nproc)" -I FILE "$tidy" --quiet --allow-no-checks '--checks=-*' FILE -- \
    -std=c++17 -Wthread-safety -Werror -I. -isystem "$generated" -isystem "$pybind11" \
    -isystem "$headers" 2>"$generated/log"
}

if ! printf '%s\n' *.cc tests/*_test.cc | check; then
  cat "$generated/log" >&2
  exit 1
fi
# Refused for this reason alone.
errors=$(echo tests/thread_safety_violation.cc | check | grep 'error:') || true
if [ -z "$errors" ] || echo "$errors" | grep -qv 'clang-diagnostic-thread-safety'; then
  echo "clang must refuse tests/thread_safety_violation.cc for its mutex, but says: $errors" >&2
  exit 1
fi
echo "Thread safety: clang accepts all of csrc/ and refuses the violation."
