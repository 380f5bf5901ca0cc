#!/bin/bash
# An array of tasks that share no process group: each makes a part of the shards of a store or of a reinforcement.
#   sbatch --array=0-255 configs/slurm/array.sh embed ViT-B-32 --weights laion2b_s34b_b79k --data.predict shards --output stores/photos
#   sbatch --array=0-63 configs/slurm/array.sh predict --config configs/mobileclip/reinforce.yaml --data.pairs pairs.parquet --data.folder reinforced
# Tasks are numbered from 0. Shards that exist are skipped: submit the array again if some of its tasks failed.
#SBATCH --job-name=vlightning
#SBATCH --array=0-63
#SBATCH --ntasks=1
#SBATCH --gpus=1
#SBATCH --cpus-per-task=12
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%A_%a.out
set -euo pipefail

export OMP_NUM_THREADS=1 # threads of a process that computes on a GPU; loader workers take the other cores
option=--part
if [ "$1" = predict ]; then option=--data.part; fi
exec srun vlightning "$@" "$option=$SLURM_ARRAY_TASK_ID/$((SLURM_ARRAY_TASK_MAX + 1))"
