#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Have clang check that members are used under the mutex that guards them (mutex.h), and that it
# refuses a file that breaks this rule. Argument: a Python with pybind11, for the bindings.
set -eu
python=${1:-python3}
for tool in clang++ protoc grpc_cpp_plugin; do
  if ! command -v $tool >/dev/null; then
    echo "There is no $tool here: the check of thread safety is left out."
    exit 0
  fi
done
pybind11=$("$python" -c 'import pybind11; print(pybind11.get_include())')
headers=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
cd "$(dirname "$0")"
generated=$(mktemp -d)
trap 'rm -rf "$generated"' EXIT
protoc --cpp_out="$generated" --grpc_out="$generated" \
  --plugin=protoc-gen-grpc="$(command -v grpc_cpp_plugin)" rpcenv.proto

check() {
  clang++ -std=c++17 -fsyntax-only -Wthread-safety -Werror -I. -isystem "$generated" \
    -isystem "$pybind11" -isystem "$headers" "$@"
}

for file in *.cc; do check "$file"; done
if check tests/thread_safety_violation.cc 2>"$generated/errors"; then
  echo "clang accepts tests/thread_safety_violation.cc, so the check finds nothing." >&2
  exit 1
fi
# Refused for this reason alone.
if [ "$(grep -c 'error:' "$generated/errors")" != "$(grep -c 'Wthread-safety' "$generated/errors")" ]; then
  cat "$generated/errors" >&2
  exit 1
fi
echo "Thread safety: clang accepts all of csrc/ and refuses the violation."
