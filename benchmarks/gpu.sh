#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What a machine with a GPU has to show, in four parts of less than ten minutes, each of which can
# begin on a bare machine:
#
#   bash benchmarks/gpu.sh first     machine setup tests environments net
#   bash benchmarks/gpu.sh second    setup contended sweep
#   bash benchmarks/gpu.sh third     setup pong trace
#   bash benchmarks/gpu.sh fourth    setup ppo gala
#   bash benchmarks/gpu.sh STAGE...
#
#   machine       what is there: GPU, cores, memory, packages
#   setup         installs wheels and unpacks gRPC's packages from folders; builds the extension
#   tests         tests/test_cuda.py
#   environments  alone, on all cores at once
#   net           learning and inference alone: nets, sizes, precisions
#   contended     learning and inference in threads of one process, as in PolyBeast
#   sweep         whole programs at many settings, for seconds each
#   pong          PolyBeast until Pong's mean return passes 18, or for 4 minutes, with its log
#   trace         profile of the learner, alone and in PolyBeast
#   ppo, gala     the same as pong with these programs, for 3 minutes each
#
# Results go to $OUT (default: ./gpu_results) as they come: a file STAGE.txt, what is named in it, and
# the folders environments/ and runs/. A stage that fails, or takes longer than its limit, ends none of
# the others. Without a network, setup needs WHEELS, a folder of those Python packages that are
# missing, and DEBS, a folder of gRPC's Debian packages, which it unpacks into $PREFIX. PYTHON is
# python3 unless it says otherwise.
#
# --disable_cuda before all else shows in minutes, on any machine, that the stages run: each in small,
# on the CPU. On a slow or loaded machine, SLOWER=3 multiplies limits
# and how long pong, trace, ppo and gala run.
set -euo pipefail
cd "$(dirname "$0")/.."

export OUT=${OUT:-$PWD/gpu_results} PREFIX=${PREFIX:-/tmp/torchbeast} PYTHONUNBUFFERED=1
export PYTHON=${PYTHON:-python3} WHEELS=${WHEELS:-wheels} DEBS=${DEBS:-debs} QUICK=${QUICK:-}
if [ "${1:-}" = --disable_cuda ]; then
  export QUICK=1 CUDA_VISIBLE_DEVICES='' CUDA_TESTS_ON=cpu
  shift
fi
declare -A LIMITS=( # seconds
  [machine]=30 [setup]=90 [tests]=250 [environments]=60 [net]=150 [contended]=70 [sweep]=390
  [pong]=270 [trace]=150 [ppo]=210 [gala]=210
)

if [ $# = 0 ]; then
  sed -n '3,/^set/s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi

if [ "${IN_STAGE:-}" = '' ]; then # run each stage as a process of its own, under its time limit
  stages=()
  for argument; do
    case $argument in
      first) stages+=(machine setup tests environments net) ;;
      second) stages+=(setup contended sweep) ;;
      third) stages+=(setup pong trace) ;;
      fourth) stages+=(setup ppo gala) ;;
      *) stages+=("$argument") ;;
    esac
  done
  for stage in "${stages[@]}"; do
    [ "${LIMITS[$stage]:-}" ] || { echo "there is no stage $stage: ${!LIMITS[*]}" >&2 && exit 2; }
  done
  mkdir -p "$OUT" "$PREFIX"
  failed=()
  for stage in "${stages[@]}"; do
    echo "== $stage, $(date -u +'%F %T'), commit $(git rev-parse --short HEAD 2>/dev/null || echo '?')"
    begin=$SECONDS
    IN_STAGE=1 timeout --kill-after 20 "$((LIMITS[$stage] * ${SLOWER:-1}))" bash "$0" "$stage" 2>&1 |
      tee "$OUT/$stage.txt" || failed+=("$stage (status $?)")
    echo "== $stage took $((SECONDS - begin)) s"
  done
  echo "== done, $(date -u +'%F %T'); failed: ${failed[*]:-none}"
  exit $((${#failed[@]} > 0))
fi

site=$PREFIX/site libraries=$PREFIX/usr/lib/$(uname -m)-linux-gnu runs=$OUT/runs
export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH} PATH=$site/bin:$PATH
if [ -d "$libraries" ] || [ -d "$DEBS" ]; then
  export PATH=$PREFIX/usr/bin:$PATH CMAKE_PREFIX_PATH=$PREFIX/usr
  export LD_LIBRARY_PATH=$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi
cores=$("$PYTHON" -c 'from beast.machine import count_cores; print(count_cores())')

machine() {
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader ||
    echo 'No GPU that nvidia-smi knows of.'
  lscpu | grep -E 'Model name|^CPU\(s\)|Thread|NUMA node|bf16' || true
  free -g | head -2
  df -h /dev/shm | tail -1
  local packages='torch|numpy|gymnasium|ale|opencv|grpcio|protobuf|pybind11|setuptools|cmake|pytest'
  "$PYTHON" -m pip list 2>/dev/null | grep -iE "^($packages|tqdm|tensorboard)" || true
  local name missing=()
  for name in torch numpy gymnasium ale_py cv2 grpc google.protobuf pybind11 setuptools pytest tqdm \
    tensorboard; do
    "$PYTHON" -c "import $name" 2>/dev/null || missing+=("$name")
  done
  for name in g++ make cmake; do
    command -v "$name" >/dev/null || missing+=("$name")
  done
  echo "Missing before setup (tensorboard may be): ${missing[*]:-nothing}"
}

setup() {
  if [ -d "$WHEELS" ]; then
    "$PYTHON" -m pip install --quiet --no-index --no-deps --upgrade --target "$site" "$WHEELS"/*.whl
  fi
  if [ -d "$DEBS" ]; then
    for package in "$DEBS"/*.deb; do dpkg -x "$package" "$PREFIX"; done
    # Absolute links would lead out of it.
    find "$libraries" -lname '/[lu]*' | while read -r link; do
      ln -sfn "$PREFIX$(readlink "$link")" "$link"
    done
  fi
  time "$PYTHON" setup.py --quiet build_ext --inplace
  "$PYTHON" -c 'import libtorchbeast, torch; print(libtorchbeast.ActorPool, torch.__version__,
    torch.cuda.is_available() and torch.cuda.get_device_name())'
}

tests() {
  local options=(tests/test_cuda.py)
  # Where there is no plugin for time limits, ours does.
  "$PYTHON" -c 'import pytest_timeout' 2>/dev/null || options+=(-o timeout= -o faulthandler_timeout=90)
  if [ "$QUICK" ]; then options+=(-k "not on_another_device and not moment"); fi # whole programs
  "$PYTHON" -m pytest -q --durations 5 -p no:cacheprovider "${options[@]}"
}

# Sums of rates that each core makes in a second of its time while all others do the same.
environments() {
  local folder=$OUT/environments options=(--steps 3000 --repeats 3) pids=() status=0
  if [ "$QUICK" ]; then options=(--steps 200 --repeats 1); fi
  rm -rf "$folder" && mkdir "$folder"
  for core in $("$PYTHON" -c 'import os; print(*os.sched_getaffinity(0))'); do
    "$PYTHON" benchmarks/environments.py --core "$core" "${options[@]}" >"$folder/$core" &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || status=1; done
  cat "$folder"/* | grep '^- Machine\|^- Versions\|^- Commit' | sort -u || true
  awk -F'|' '
    /^\| [a-e]:/ { gsub(",", "", $3); sum[$2] += $3; cores[$2]++ }
    END { for (way in sum) printf "|%s| %d steps/s on %d cores |\n", way, sum[way], cores[way] }
  ' "$folder"/* | sort
  return $status
}

net() {
  local options=(--seconds 2 --precisions bf16 --batch_sizes 8,32,128 --rows 16,64,256)
  if [ "$QUICK" ]; then options=(--batch_sizes 4 --rows 8 --seconds 0.3); fi
  "$PYTHON" benchmarks/net.py "${options[@]}"
}

contended() {
  local options=(--contended --seconds 4 --precisions bf16 --batch_sizes 8,32 --rows 64,256)
  if [ "$QUICK" ]; then options=(--contended --batch_sizes 4 --rows 8 --seconds 0.3); fi
  "$PYTHON" benchmarks/net.py "${options[@]}"
}

# Not the whole grid of servers {14, 16}, streams {1, 2}, environments {8, 16, 32} and batches {8, 32}:
# for both nets its 24 settings take 48 runs of 30 s, starts included, which is 24 minutes. By estimate,
# launches are the limit at a batch of 8, and cores at 32.
sweep() {
  local seconds=11 setting settings=(
    "polybeast" # the defaults
    "polybeast --batch_size 8 --num_servers $cores --num_actors $((2 * cores)) --envs_per_stream 16"
    "polybeast --batch_size 32"
    "polybeast --batch_size 32 --num_servers $cores --num_actors $((2 * cores)) --envs_per_stream 16"
    "polybeast --batch_size 32 --num_servers $cores --num_actors $((2 * cores)) --envs_per_stream 32"
    "polybeast --batch_size 32 --num_servers $cores --num_actors $cores --envs_per_stream 32"
    "polybeast --batch_size 32 --num_servers $((cores - 2)) --num_actors $((2 * cores - 4)) --envs_per_stream 16"
    "polybeast --batch_size 32 --num_servers $cores --num_actors $((2 * cores)) --envs_per_stream 16 --num_inference_threads 2"
    "polybeast --batch_size 8 --model shallow"
    "polybeast --batch_size 32 --model shallow --num_servers $cores --num_actors $((2 * cores)) --envs_per_stream 16"
    "monobeast"
    "monobeast --batch_size 32"
    "monobeast --batch_size 32 --num_actors $cores --envs_per_actor 16"
  )
  if [ "$QUICK" ]; then
    settings=("polybeast --num_servers 1 --num_actors 1 --envs_per_stream 4 --batch_size 4" monobeast)
    seconds=7
  fi
  for setting in "${settings[@]}"; do
    echo "== $setting"
    # shellcheck disable=SC2086 # words
    "$PYTHON" benchmarks/whole.py --only_whole --repeats 1 --whole_seconds "$seconds" \
      --program $setting | grep -v '^- Machine\|^- Versions\|^- Commit\|^$' || echo 'It failed.'
    nvidia-smi --query-gpu=memory.used --format=csv,noheader 2>/dev/null || true
  done
}

# PolyBeast's flags for Pong: those of the sweep with the highest rate at which it still learns fast.
pong() {
  local flags=(--model shallow --batch_size 8) seconds=240
  if [ "$QUICK" ]; then
    flags=(--model shallow --num_servers 1)
    seconds=25
  fi
  train_for "$seconds" polybeast pong --seed 1 --total_steps 5000000 ${PONG_FLAGS:-"${flags[@]}"}
  tail -1 "$runs/pong/logs.csv"
}

trace() {
  local options=(--nets deep --precisions bf16 --batch_sizes 32) seconds=50
  if [ "$QUICK" ]; then
    options=(--nets shallow --precisions fp32 --batch_sizes 2)
    seconds=40
  fi
  "$PYTHON" benchmarks/net.py "${options[@]}" --trace "$OUT/trace_learner.json"
  gzip -f "$OUT/trace_learner.json"
  local flags=(--batch_size 32)
  if [ "$QUICK" ]; then flags=(--num_servers 1 --model shallow --batch_size 2); fi
  train_for "$seconds" polybeast trace --write_profiler_trace "${flags[@]}"
  gzip -f "$runs/trace/trace.json" || echo 'Too few updates for a trace.'
  ls -l "$OUT/trace_learner.json.gz" "$runs/trace/trace.json.gz"
}

ppo() {
  local seconds=180
  if [ "$QUICK" ]; then seconds=25; fi
  train_for "$seconds" ppo ppo --seed 1 ${PPO_FLAGS:-}
  tail -1 "$runs/ppo/logs.csv"
}

# All agents share the GPU.
gala() {
  local seconds=180
  if [ "$QUICK" ]; then seconds=25; fi
  train_for "$seconds" gala gala --seed 1 --num_agents 4 --envs_per_agent 16 ${GALA_FLAGS:-}
  tail -1 "$runs/gala/logs.csv"
}

# Runs a program as a run of this name, for so many seconds at most, or until the mean return of the
# last 100 episodes has passed 18.
train_for() {
  local seconds=$(($1 * ${SLOWER:-1})) program_name=$2 name=$3
  shift 3
  rm -rf "${runs:?}/$name"
  "$PYTHON" "$program_name.py" --env PongNoFrameskip-v4 --savedir "$runs" --xpid "$name" "$@" &
  local program=$!
  "$PYTHON" - "$runs/$name/logs.csv" "$seconds" "$program" <<'PYTHON'
import csv, os, signal, sys, time

path, seconds, program = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
end = time.monotonic() + seconds
while time.monotonic() < end and os.path.exists(f"/proc/{program}/exe"):
    time.sleep(1)
    rows = list(csv.DictReader(open(path))) if os.path.exists(path) else []
    if any(float(row["mean_episode_return"] or -99) >= 18 for row in rows[:-1]):
        seconds = float(rows[-1]["_time"]) - float(rows[0]["_time"])
        print(f"18 passed after {rows[-1]['step']} steps, {seconds:.0f} s", flush=True)
        break
os.kill(program, signal.SIGINT)
PYTHON
  wait "$program" || true # its status is that of a signal
}

"$1"
