#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Set up this machine, as far as that is not done yet: sh scripts/setup.sh [dev] [compiler]
#
#             a virtual environment in .venv, with requirements.txt
#   dev       with requirements-dev.txt as well
#   compiler  also the packages that compile the C++ core, on Debian and Ubuntu (else see setup.py)
#
# PYTHON=python3.12 in the environment chooses the Python. The script prints first what it will do.
set -eu
cd "$(dirname "$0")/.."

# Another make may be setting up the same .venv. This script is as good a file to lock as another.
if [ -w scripts/setup.sh ] && command -v flock >/dev/null; then
  exec 9>>scripts/setup.sh
  flock --nonblock 9 || { echo 'Waiting for another make, which sets up .venv.'; flock 9; } || true
fi

fail() {
  printf '%s\n' "$@" >&2
  exit 1
}

files='requirements-env.txt requirements.txt' python=.venv/bin/python
create= install= compiler= packages= sudo= status=0
case "$*" in *dev*) files="$files requirements-dev.txt" ;; esac
case "$*" in *compiler*) [ -e .venv/.from/compiler ] || compiler=yes ;; esac
requirements=${files##* }
get_version='import sys; print("%d.%d" % sys.version_info[:2])
sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))'

# .venv/.incomplete is there while pip works: what a killed pip leaves cannot be mended.
if [ -e .venv/.incomplete ] || ! version=$($python -ISc "$get_version" 2>&1) ||
  [ ! -d ".venv/lib/python$version" ] ||  # the system's Python is a newer one now
  { [ "${PYTHON:-}" ] && [ "$version" != "$("$PYTHON" -ISc "$get_version" 2>&1)" ]; }; then
  create=yes
  case "$*" in *compiler*) compiler=yes ;; esac
  candidates=${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}
  for python in $candidates ''; do
    if version=$("$python" -ISc "$get_version" 2>/dev/null); then break; fi
  done
  [ "$python" ] || fail "No Python from 3.11 to 3.14 found; tried: $candidates. Install one" \
    '(Debian 12, Ubuntu 24.04 or newer: apt-get install python3 python3-venv), or name one that' \
    'you have: make pong PYTHON=/path/to/python3.12'
  "$python" -c 'import ensurepip' 2>/dev/null || packages=" python$version-venv"
fi
[ ! -e .venv ] || [ -d .venv/.from ] || [ -e .venv/.incomplete ] ||
  fail 'There is a .venv that this script has not made: move it away, or use it by hand:' \
    "  pip install -r $requirements"
[ ! -e .venv/.from/folder ] || [ "$(cat .venv/.from/folder)" = "$(pwd -P)" ] ||
  echo "This folder was $(cat .venv/.from/folder), whose name .venv holds: if a command is not" \
    'found, remove .venv, and the same make sets it up again.'
for file in $files; do cmp -s "$file" ".venv/.from/$file" || install=yes; done
if [ "$compiler" ] && command -v apt-get >/dev/null; then
  { command -v make && command -v cmake && command -v protoc && command -v grpc_cpp_plugin &&
    echo '#include <grpcpp/grpcpp.h>' |
    ${CXX:-c++} ${CONDA_PREFIX:+"-I$CONDA_PREFIX/include"} -E -x c++ -; } >/dev/null 2>&1 ||
    packages="$packages g++ make cmake pkg-config libgrpc++-dev libprotobuf-dev protobuf-compiler-grpc"
  include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
  [ -e "$include/Python.h" ] || packages="$packages python$version-dev"
fi

[ -z "$packages$create$install" ] || echo 'This will:'
if [ "$packages" ]; then
  echo "  install with apt-get:$packages"
  [ "$(id -u)" = 0 ] || sudo='sudo -n'
  command -v apt-get >/dev/null && $sudo true 2>/dev/null ||
    fail 'That is for root to do (or by conda, see setup.py). As root, run this, then make again:' \
      "  apt-get update && apt-get install -y --no-install-recommends$packages"
fi
[ -z "$create" ] || [ ! -e .venv ] || echo '  remove .venv, which is incomplete or of another Python'
[ -z "$create" ] || echo "  make a virtual environment in .venv with $python, Python $version"
[ -z "$create$install" ] || echo "  install in .venv with pip: $requirements (this takes minutes)"

if [ "$packages" ]; then
  $sudo apt-get update -q || true  # one source that cannot be reached need not matter
  $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $packages ||
    fail 'apt-get failed, see above. Is there a network? The same make tries again.'
fi
if [ "$create$install" ]; then
  [ -z "$create" ] || rm -rf .venv
  mkdir -p .venv
  touch .venv/.incomplete
  [ -z "$create" ] || "$python" -m venv .venv
  mkdir -p .venv/.from
  [ -z "$create" ] || pwd -P >.venv/.from/folder
  .venv/bin/python -m pip --version >/dev/null 2>&1 || .venv/bin/python -m ensurepip ||
    fail 'There is no pip in .venv: remove that.'
  trap 'exit 130' INT  # bash would go on: after Ctrl-C, pip exits as if it had failed
  .venv/bin/python -m pip install --disable-pip-version-check -r "$requirements" || status=$?
  [ "$status" -gt 2 ] || rm .venv/.incomplete  # it ended by itself, even if it installed nothing
  [ "$status" = 0 ] ||
    fail "pip could not install $requirements, see above. Is there a network? The same make tries again."
  cp $files .venv/.from/
fi
[ -z "$compiler" ] || touch .venv/.from/compiler
