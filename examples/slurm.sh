#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# PolyBeast under Slurm: one node learns, the others play. What follows the game goes to the learner:
#     sbatch examples/slurm.sh PongNoFrameskip-v4 --total_steps 50000000
#SBATCH --job-name=torchbeast --time=12:00:00
#SBATCH --requeue --open-mode=append --signal=B:TERM@120
#SBATCH --nodes=1 --ntasks=1 --cpus-per-task=8 --gpus=1
#SBATCH hetjob
#SBATCH --nodes=2 --ntasks-per-node=1 --cpus-per-task=32

set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
game=$1
shift
num_cores=$SLURM_CPUS_PER_TASK_HET_GROUP_0
num_servers=$SLURM_CPUS_PER_TASK_HET_GROUP_1  # on each node, one a core
port=$((20000 + SLURM_JOB_ID % 20000))        # jobs that share a node do not meet
addresses=
for host in $(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_1"); do
  addresses+=${addresses:+,}$host:$port-$((port + num_servers - 1))
done

# Other users of the cluster reach the same ports.
token=$PWD/token-$SLURM_JOB_ID
(umask 077 && openssl rand -hex 32 >"$token")

srun --het-group=1 --cpus-per-task="$num_servers" python polybeast_env.py \
  --env "$game" --server_address "0.0.0.0:$port" --num_servers "$num_servers" \
  --auth_token_file "$token" &
servers=$!
srun --het-group=0 --cpus-per-task="$num_cores" python polybeast.py \
  --env "$game" --server_addresses "$addresses" --xpid "$SLURM_JOB_NAME-$SLURM_JOB_ID" \
  --auth_token_file "$token" "$@" &
learner=$!

# Two minutes before the time is up: the learner saves and ends, and the same job goes on later.
again=
trap 'again=yes; kill -TERM "$learner"' TERM
status=0
wait "$learner" || status=$?  # a signal cuts it short
if [ "$again" ]; then
  wait "$learner" || true
  scontrol requeue "$SLURM_JOB_ID"
fi
kill -TERM "$servers" || true
wait "$servers" || true
rm -f "$token"
exit "$status"
