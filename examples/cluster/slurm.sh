#!/bin/bash
# Two machines with eight GPUs each, as one Ray cluster for the time of a job:
#   sbatch examples/cluster/slurm.sh
# When Slurm ends the job, or a machine fails, the run is saved and the job queued again: it goes on where it stood.
#SBATCH --job-name=panoply
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

# A folder that all machines see: model, data, plug-ins and the run lie there.
SHARED=${SHARED:-$PWD}
RUN=$SHARED/runs/grpo-math
TRAIN=(
  grpo --model "$SHARED/models/7b" --data "$SHARED/math.jsonl" --reward "$SHARED/rewards.py:good"
  --set run.dtype=bfloat16 --run "$RUN"
)
PLACED=(--cluster auto --learners 4 --samplers 12)

# Newer Rays let nobody in without a token; it lies in the home folder, which all machines share.
ray get-auth-token --generate > /dev/null || true

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
port=$((20000 + SLURM_JOB_ID % 20000))
address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{print $1}'):$port

started=(ray start --num-gpus=8 --num-cpus=64 --disable-usage-stats --block)
srun --nodes=1 --ntasks=1 --nodelist="$head" "${started[@]}" --head --port="$port" --include-dashboard=false &
sleep 15
if ((${#nodes[@]} > 1)); then
  others=$(IFS=,; echo "${nodes[*]:1}")
  srun --nodes=$((${#nodes[@]} - 1)) --ntasks-per-node=1 --nodelist="$others" "${started[@]}" --address="$address" &
  sleep 15
fi

# This script runs on the first machine, and so does the driver.
export RAY_ADDRESS=$address
if [[ -d $RUN/checkpoints ]]; then
  panoply train --resume "$RUN" "${PLACED[@]}" &
else
  panoply train "${TRAIN[@]}" "${PLACED[@]}" &
fi
run=$!
# SIGTERM comes two minutes before the time is up: the run finishes its step, is saved, and the job queued again.
trap 'kill -TERM $run; wait $run || true; scontrol requeue "$SLURM_JOB_ID"' TERM
wait $run
