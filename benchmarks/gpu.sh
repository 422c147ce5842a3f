#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What a machine with a GPU has to show, from a bare start:
#
#   bash benchmarks/gpu.sh long               all stages, in nine minutes
#   bash benchmarks/gpu.sh short              after a change: setup, tests, whole; three
#   bash benchmarks/gpu.sh STAGE=SECONDS...   stages and their time limits
#
#   machine   what is there: GPU, cores, memory, packages
#   setup     what is missing, from the folder that pack_gpu.sh fills; else compiles the extension
#   tests     tests/learners/test_cuda.py
#   whole     Pong by each program at its defaults, and at the settings with the best estimates
#   pong      PolyBeast until Pong's mean return passes 18, with a profile
#
# All that is printed goes to $OUT/results.txt at once (default: ./gpu_results), and after each stage
# the runs, without checkpoints, to $OUT/runs.tar.gz. A stage that fails, or reaches its limit, ends
# none of the others. Only $PREFIX (default: /tmp/torchbeast) and compiled modules here are written to
# besides. PYTHON is python3 unless it says otherwise; PONG_FLAGS are more flags for pong.
#
# --disable_cuda before all else shows that the stages run: in small, on the CPU of any machine. On a
# slow or loaded one, SLOWER=3 multiplies the limits.
set -euo pipefail
cd "$(dirname "$0")/.."

export OUT=${OUT:-$PWD/gpu_results} PREFIX=${PREFIX:-/tmp/torchbeast} PYTHON=${PYTHON:-python3}
export PYTHONPATH=$PREFIX/site${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 QUICK=${QUICK:-}
if [ "${1:-}" = --disable_cuda ]; then
  export QUICK=1 CUDA_VISIBLE_DEVICES='' CUDA_TESTS_ON=cpu
  shift
fi

machine() {
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader ||
    echo 'No GPU that nvidia-smi knows of.'
  grep PRETTY_NAME /etc/os-release || true
  lscpu | grep -oE '(Model name|CPU\(s\)|Thread).*|\w+bf16' || true
  free -g | head -2
  df -h /dev/shm | tail -1
  "$PYTHON" - <<'PYTHON'
import importlib.metadata, platform, shutil, sys
print(sys.executable, sys.version, *platform.libc_ver())
for name in ("torch numpy gymnasium ale-py opencv-python-headless grpcio protobuf tensorboard "
             "pytest pytest-timeout pytest-xdist pybind11 setuptools").split():
    found = [d.version for d in importlib.metadata.distributions(name=name)]
    print(name, *(found or ["is missing"]), end="; ")
print(*(f"{name}: {shutil.which(name)}" for name in ("g++", "make", "cmake", "protoc")))
PYTHON
}

setup() {
  "$PYTHON" - "$PREFIX/site" <<'PYTHON'
import importlib.metadata, pathlib, sys, zipfile
for wheel in sorted(pathlib.Path("gpu_packages").glob("*.whl")):
    name, files = wheel.name.split("-")[0], zipfile.ZipFile(wheel)
    if name == "libtorchbeast":  # the compiled modules and gRPC's libraries; the rest is here
        files.extractall(".", [file for file in files.namelist() if ".so" in file])
    elif not any(importlib.metadata.distributions(name=name.replace("_", "-"))):
        files.extractall(sys.argv[1])
        print("installed", wheel.name)
PYTHON
  "$PYTHON" -c 'import libtorchbeast, nest; libtorchbeast.ActorPool' ||
    "$PYTHON" setup.py --quiet build_ext --inplace
  "$PYTHON" -c 'import libtorchbeast, torch; print(libtorchbeast.ActorPool, torch.__version__,
    torch.cuda.is_available() and torch.cuda.get_device_name())'
}

tests() {
  local options=(tests/learners/test_cuda.py --numprocesses 6 --dist worksteal)
  if [ "$QUICK" ]; then options=(tests/learners/test_cuda.py -k "not on_another_device and not moment"); fi
  # Failures are printed at once too, since the report may come too late.
  cat >"$PREFIX/site/print_failures.py" <<'PYTHON'
def pytest_runtest_logreport(report):
    if report.failed:
        print(report.longreprtext, report.capstdout, report.capstderr, flush=True)
PYTHON
  "$PYTHON" -m pytest -v --timeout $((STAGE_LIMIT * 2 / 3)) --durations 5 -p no:cacheprovider \
    -p print_failures "${options[@]}"
}

whole() {
  local i status=0 settings=(
    "polybeast"
    "polybeast --batch_size 32 --envs_per_stream 16"
    "monobeast"
    "ppo"
    "polybeast --model shallow"
    "polybeast --model shallow --batch_size 32 --envs_per_stream 16"
    "monobeast --batch_size 32 --envs_per_actor 16"
  )
  settings=("${settings[@]:0:${NUM_SETTINGS:-7}}")
  for i in "${!settings[@]}"; do
    # shellcheck disable=SC2086 # words
    train_for $((STAGE_LIMIT / ${#settings[@]} - 7)) "$i" ${settings[i]} --disable_checkpoint \
      --checkpoint_interval_s 1 || status=1 # that is the interval of rows as well
  done
  return $status
}

pong() {
  local seconds=$((STAGE_LIMIT - 15))
  if [ "$QUICK" ]; then seconds=$((seconds / 4)); fi
  # shellcheck disable=SC2086 # words
  train_for "$seconds" pong polybeast --model shallow --seed 1 --write_profiler_trace \
    ${PONG_FLAGS:-}
}

# Trains Pong for so many seconds, starts included, or until the mean return of the last 100 episodes
# has passed 18: train_for SECONDS NAME PROGRAM [FLAG...]
train_for() {
  "$PYTHON" - "$PREFIX/runs" "$@" <<'PYTHON'
import importlib.util, os, pathlib, signal, subprocess, sys, time
sys.path.insert(0, "benchmarks")
from ab import read_rows, steps_per_second

savedir, seconds, name, program, *flags = sys.argv[1:]
begin, folder = time.monotonic(), pathlib.Path(savedir)
small = {"polybeast": "--num_servers 1 --num_actors 1 --envs_per_stream 4 --batch_size 2",
         "monobeast": "--num_actors 1 --envs_per_actor 4 --batch_size 2",
         "ppo": "--num_envs 4 --unroll_length 16"}
output = folder / f"{name}.txt"
command = [sys.executable, f"{program}.py", "--env", "PongNoFrameskip-v4", *flags]
if program != "ppo" and not importlib.util.find_spec("cv2"):
    command += ["--env_backend", "ale_vector"]
if os.environ["QUICK"]:
    command += small[program].split()
print("==", *command, flush=True)
command += ["--savedir", savedir, "--xpid", name]
with open(output, "w") as file:
    process = subprocess.Popen(command, stdout=file, stderr=file)
rows = []
while process.poll() is None and time.monotonic() < begin + float(seconds):
    time.sleep(1)
    rows = read_rows(folder / name / "logs.csv")[:-1]  # the last may not be whole
    if any(float(row["mean_episode_return"] or -99) >= 18 for row in rows):
        print(f"18 passed after {rows[-1]['step']} steps, {time.monotonic() - begin:.0f} s")
        break
process.send_signal(signal.SIGINT)
try:
    process.wait(6)
except subprocess.TimeoutExpired:
    process.kill()
if len(rows) < 2:
    sys.exit(f"{output.read_text()[-3000:]}\nIt logged too few rows.")
rate = steps_per_second(rows[len(rows) // 3 :] if len(rows) > 3 else rows)  # the rest is warm-up
print(f"{rate:,.0f} steps/s; the last row:",
      *(f"{key} {float(x):.4g}" for key, x in rows[-1].items() if x and key[0] != "_"))
PYTHON
}

if [ "${STAGE_LIMIT:-}" ]; then # a stage, in a process of its own
  "$1"
  exit
fi

case ${1:-} in
  # A program needs some 15 s until it learns, with a process for each of 16 cores.
  long) stages=(machine=10 setup=50 tests=115 whole=215 pong=120) ;;
  short) stages=(setup=35 tests=60 whole=65) NUM_SETTINGS=2 ;;
  *=*) stages=("$@") ;;
  *)
    sed -n '3,/^set/s/^# \{0,1\}//p' benchmarks/gpu.sh >&2
    exit 2
    ;;
esac

run_stages() {
  local stage total=0 begin limit failed=()
  for stage in "${stages[@]}"; do total=$((total + ${stage#*=} * ${SLOWER:-1} + 5)); done
  echo "== commit $(git describe --always --dirty 2>/dev/null || cat gpu_packages/commit), at most" \
    "$total s"
  for stage in "${stages[@]}"; do
    echo "== ${stage%=*}, $(date -u +'%F %T')"
    begin=$SECONDS
    limit=$((${stage#*=} * ${SLOWER:-1}))
    STAGE_LIMIT=$limit timeout --signal INT --kill-after 5 "$limit" bash benchmarks/gpu.sh "${stage%=*}" ||
      failed+=("${stage%=*} (status $?)")
    tar -czf "$OUT/runs.tar.gz" --exclude '*.tar' -C "$PREFIX" runs || true
    echo "== ${stage%=*} took $((SECONDS - begin)) s"
  done
  echo "== done, $(date -u +'%F %T'); failed: ${failed[*]:-none}"
  return $((${#failed[@]} > 0))
}

export NUM_SETTINGS=${NUM_SETTINGS:-}
mkdir -p "$OUT" "$PREFIX/site"
rm -rf "${PREFIX:?}/runs" && mkdir "$PREFIX/runs"
run_stages 2>&1 | tee "$OUT/results.txt"
