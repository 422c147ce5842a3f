#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Measures everything on a machine with one GPU, a stage at a time, each of less than ten minutes:
#
#   bash benchmarks/gpu.sh STAGE...
#
#   setup         installs wheels and unpacks gRPC's packages from folders; builds the extension
#   tests         that use a GPU where there is one
#   net           learning and inference alone: nets, sizes, precisions
#   environments  alone, on all cores at once
#   parts         each program at one setting, next to its parts
#   whole         PolyBeast's deep net at several settings
#   trace         profile of the learner, alone and in PolyBeast
#   train         PolyBeast from the start for minutes, with its curve
#
# Results go to $OUT (default: ./gpu_results), a file STAGE.txt and what is named in it. Without a
# network, setup needs WHEELS, a folder of those Python packages that are missing, and DEBS, a folder
# of gRPC's Debian packages, which it unpacks into $PREFIX. PYTHON is python3 unless it says
# otherwise. QUICK=1 shows in minutes, on a machine without a GPU too, that all stages run.
set -euo pipefail
cd "$(dirname "$0")/.."

OUT=${OUT:-$PWD/gpu_results}
PYTHON=${PYTHON:-python3}
PREFIX=${PREFIX:-/tmp/torchbeast}
WHEELS=${WHEELS:-wheels}
DEBS=${DEBS:-debs}
QUICK=${QUICK:-}
STAGES=(setup tests net environments parts whole trace train)

libraries=$PREFIX/usr/lib/$(uname -m)-linux-gnu
export PYTHONUNBUFFERED=1
export PYTHONPATH=$PREFIX/site${PYTHONPATH:+:$PYTHONPATH}
if [ -d "$libraries" ] || [ -d "$DEBS" ]; then
  export PATH=$PREFIX/usr/bin:$PATH CMAKE_PREFIX_PATH=$PREFIX/usr
  export LD_LIBRARY_PATH=$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi
cores=$(nproc)
servers=$((cores > 3 ? cores - 2 : 1)) # two cores for the learner's process
runs=$PREFIX/runs

setup() {
  if [ -d "$WHEELS" ]; then
    "$PYTHON" -m pip install --quiet --no-index --no-deps --upgrade --target "$PREFIX/site" \
      "$WHEELS"/*.whl
  fi
  if [ -d "$DEBS" ]; then
    for package in "$DEBS"/*.deb; do dpkg -x "$package" "$PREFIX"; done
    # Absolute links would lead out of it.
    find "$libraries" -lname '/[lu]*' | while read -r link; do
      ln -sfn "$PREFIX$(readlink "$link")" "$link"
    done
  fi
  "$PYTHON" setup.py --quiet build_ext --inplace
  "$PYTHON" -c 'import libtorchbeast; print(libtorchbeast.ActorPool)'
}

tests() {
  local files=(tests/test_{batching_queue,learner,learn,parity,streams,programs}.py)
  if [ "$QUICK" ]; then files=(tests/test_batching_queue.py -k pin); fi
  timeout 480 "$PYTHON" -m pytest -q --durations 5 "${files[@]}"
}

net() {
  local options=()
  if [ "$QUICK" ]; then options=(--batch_sizes 4 --rows 8 --seconds 0.3); fi
  "$PYTHON" benchmarks/net.py "${options[@]}"
}

# Sums of rates that each core makes in a second of its time while all others do the same.
environments() {
  local folder options=(--steps 3000) pids=()
  if [ "$QUICK" ]; then options=(--steps 200 --repeats 1); fi
  folder=$(mktemp -d)
  for core in $("$PYTHON" -c 'import os; print(*os.sched_getaffinity(0))'); do
    "$PYTHON" benchmarks/environments.py --core "$core" "${options[@]}" >"$folder/$core" &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid"; done
  grep -h '^- Machine\|^- Versions\|^- Commit' "$folder/0" || true
  awk -F'|' -v cores="$cores" '
    /^\| [a-e]:/ { gsub(",", "", $3); sum[$2] += $3 }
    END { for (way in sum) printf "|%s| %d steps/s on %d cores |\n", way, sum[way], cores }
  ' "$folder"/* | sort
  rm -r "$folder"
}

parts() {
  local times=(--repeats 1 --seconds 5 --whole_seconds 45)
  if [ "$QUICK" ]; then times=(--repeats 1 --seconds 0.3 --whole_seconds 7); fi
  "$PYTHON" benchmarks/whole.py "${times[@]}" --num_actors "$servers" --envs_per_actor 16 \
    --batch_size 32
  "$PYTHON" benchmarks/whole.py "${times[@]}" --program polybeast --num_servers "$servers" \
    --envs_per_stream 32 --batch_size 32
}

whole() {
  local seconds=45 sampler=
  local settings=(
    "--num_servers $servers --envs_per_stream 8 --batch_size 32"
    "--num_servers $servers --envs_per_stream 32 --batch_size 32"
    "--num_servers $servers --envs_per_stream 32 --batch_size 32 --num_inference_threads 2"
    "--num_servers $servers --envs_per_stream 64 --batch_size 128 --num_inference_threads 2"
    # Two streams a server: one is played while inference answers the other.
    "--num_servers $servers --num_actors $((2 * servers)) --envs_per_stream 32 --batch_size 64"
    "--num_servers $cores --num_actors $((2 * cores)) --envs_per_stream 32 --batch_size 64"
  )
  if [ "$QUICK" ]; then
    settings=("--num_servers 1 --envs_per_stream 4 --batch_size 4")
    seconds=7
  fi
  for setting in "${settings[@]}"; do
    echo "== $setting"
    if nvidia-smi >/dev/null 2>&1; then
      nvidia-smi --query-gpu=utilization.gpu,power.draw,memory.used --format=csv,noheader,nounits \
        --loop=1 >"$PREFIX/gpu.csv" &
      sampler=$!
    fi
    # shellcheck disable=SC2086 # words
    "$PYTHON" benchmarks/whole.py --program polybeast --only_whole --repeats 1 \
      --whole_seconds "$seconds" $setting
    if [ "$sampler" ]; then
      kill "$sampler"
      # Of the last two thirds, when the program ran.
      awk -F', ' '{ u[NR] = $1; p[NR] = $2; m[NR] = $3 }
        END { for (i = int(NR / 3) + 1; i <= NR; i++) { n++; su += u[i]; sp += p[i] }
          printf "- GPU busy %.0f%% of the time, %.0f W, %d MiB\n", su / n, sp / n, m[NR] }
      ' "$PREFIX/gpu.csv"
    fi
  done
}

trace() {
  local options=(--nets deep --precisions bf16 --batch_sizes 32) seconds=60
  if [ "$QUICK" ]; then
    options=(--nets shallow --precisions fp32 --batch_sizes 2)
    seconds=40
  fi
  "$PYTHON" benchmarks/net.py "${options[@]}" --trace "$OUT/trace_learner.json"
  local flags=(--num_servers "$servers" --envs_per_stream 32 --batch_size 32)
  if [ "$QUICK" ]; then flags=(--num_servers 1 --model shallow --batch_size 2); fi
  train_for "$seconds" trace --write_profiler_trace "${flags[@]}"
  mv "$runs/trace/trace.json" "$OUT/trace_polybeast.json" || echo 'Too few updates for a trace.'
  gzip -f "$OUT"/trace_*.json
  ls -l "$OUT"/trace_*
}

train() {
  local flags=(--num_servers "$servers" --envs_per_stream 32 --batch_size 32) seconds=540
  if [ "$QUICK" ]; then
    flags=(--num_servers 1 --model shallow)
    seconds=40
  fi
  train_for "$seconds" train --seed 1 "${flags[@]}"
  cp "$runs/train/logs.csv" "$OUT/train.csv"
  cp "$runs/train/meta.json" "$OUT/train.json"
  "$PYTHON" -m beast.plot "$OUT/train.csv" --out "$OUT/train" || echo 'No curve drawn.'
}

# Runs PolyBeast for so many seconds at most, as a run of this name.
train_for() {
  local seconds=$1 name=$2 status=0
  shift 2
  rm -rf "${runs:?}/$name"
  timeout --signal INT "$seconds" "$PYTHON" polybeast.py --savedir "$runs" --xpid "$name" "$@" ||
    status=$?
  if [ "$status" != 0 ] && [ "$status" != 124 ]; then return "$status"; fi # 124: time is up
}

if [ $# = 0 ]; then
  echo "usage: bash benchmarks/gpu.sh ${STAGES[*]}" >&2
  exit 2
fi
mkdir -p "$OUT" "$PREFIX"
for stage; do
  case " ${STAGES[*]} " in
    *" $stage "*) ;;
    *) echo "there is no stage $stage: ${STAGES[*]}" >&2 && exit 2 ;;
  esac
  {
    echo "== $stage, $(date -u +'%F %T'), $cores cores"
    if nvidia-smi >/dev/null 2>&1; then
      nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
    else
      echo 'No GPU that nvidia-smi knows of.'
    fi
    "$stage"
  } 2>&1 | tee "$OUT/$stage.txt"
done
