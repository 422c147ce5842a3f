#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# PolyBeast under Slurm: this job learns, and an array of jobs that it submits plays. Flags after the
# game are for the learners; those of the game (--sticky_actions 0.25) reach both:
#     sbatch examples/slurm.sh PongNoFrameskip-v4 --total_steps 50000000
# Others may join those that play for job 123, or leave, at any time:
#     sbatch --array=3-8 slurm-123/environments
#     scancel 124_2
#SBATCH --job-name=torchbeast --time=12:00:00
#SBATCH --requeue --open-mode=append --signal=B:USR1@120
#SBATCH --nodes=1 --ntasks-per-node=1 --cpus-per-task=8 --gpus-per-node=1
# Keep this --time equal to the learners', also to one that is given to sbatch.
for_environments='--array=1-2 --time=12:00:00 --requeue --nodes=1 --ntasks=1 --cpus-per-task=32'

set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
game=$1
shift
name=$SLURM_JOB_NAME-$SLURM_JOB_ID
folder=$PWD/slurm-$SLURM_JOB_ID
num_learners=${SLURM_GPUS_ON_NODE:-1}       # on each node
port=$((10000 + SLURM_JOB_ID % 1000 * 20))  # jobs that share a node do not meet
first=
learners=
for host in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
  first=${first:-$host}
  learners+=${learners:+,}$host:$((port + 1))-$((port + num_learners))
done

# Other users of the cluster reach the same ports.
mkdir -p "$folder"
[ -s "$folder/token" ] || (umask 077 && openssl rand -hex 32 >"$folder/token")
flags=$(python -c 'import json, sys; print(json.dumps(sys.argv[1:]))' "$@")
{
  printf '#!/bin/bash\n#SBATCH --job-name=%s-env %s\n' "$name" "$for_environments"
  printf 'cd %q\n' "$PWD"
  printf '%q ' exec python polybeast_env.py --env "$game" --learner "$learners" \
    --auth_token_file "$folder/token" --learner_flags "$flags"
  printf -- '--num_servers "$SLURM_CPUS_PER_TASK"\n'
} >"$folder/environments"
scancel --name="$name-env" || true  # of this job before its node was lost
sbatch "$folder/environments"

srun --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" \
  torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "$num_learners" \
  --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$first:$port" \
  polybeast.py --env "$game" --xpid "$name" --listen "0.0.0.0:$((port + 1))" \
  --auth_token_file "$folder/token" "$@" &
learning=$!

# Two minutes before the time is up: the learners save and end, and the same job goes on later.
# scancel sends SIGTERM to its steps; srun, sent one, would kill them.
again=
trap 'again=yes; scancel --signal=TERM "$SLURM_JOB_ID" || kill -TERM "$learning"' USR1
trap : TERM  # of scancel, which ends the job for good, once the learners have saved
status=0
wait "$learning" || status=$?  # signals cut it short
while kill -0 "$learning" 2>/dev/null; do wait "$learning" || true; done
scancel --name="$name-env" || true  # which must not keep it from being requeued
if [ "$again" ]; then
  scontrol requeue "$SLURM_JOB_ID"
else
  rm -r "$folder"
fi
exit "$status"
