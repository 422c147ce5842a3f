#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Fills gpu_packages/, which gpu.sh needs on a machine without a network: this checkout's extension
# with gRPC's libraries in it, and wheels of what else the programs and tests/learners/test_cuda.py import, but
# for torch and OpenCV. They are for the Python that makes them, by default python3.12, and for Linux
# with a glibc as old as the extension's file says. Needs what `make wheel` needs, and a network.
set -euo pipefail
cd "$(dirname "$0")/.."

rm -rf gpu_packages build/wheel
mkdir gpu_packages
names='numpy|gymnasium|ale-py|grpcio|protobuf|pytest|pytest-timeout|pytest-xdist'
# shellcheck disable=SC2046 # words
"${PYTHON:-python3.12}" -m pip download --quiet --only-binary :all: --dest gpu_packages \
  $(grep -hoE "^($names)==[^ ]+" requirements*.txt)
"${PYTHON:-python3.12}" -m pip wheel --quiet --no-deps --wheel-dir build/wheel .
PATH=$PWD/.venv/bin:$PATH auditwheel repair --strip --wheel-dir gpu_packages build/wheel/*.whl 2>&1 |
  tail -n 2
git describe --always --dirty >gpu_packages/commit
size=$({ git ls-files -z && find gpu_packages -type f -print0; } | du -cb --files0-from=- | tail -n 1)
echo "gpu_packages/ and this checkout: $((${size%%[[:space:]]*} >> 20)) MiB"
