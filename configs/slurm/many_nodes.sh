#!/bin/bash
# Several nodes, one process a GPU. What follows the script's name goes to `vlightning fit`:
#   sbatch configs/slurm/many_nodes.sh --config configs/albef/pretrain_4m.yaml
# Five minutes before the time is up SLURM sends SIGUSR1; the run writes a checkpoint, requeues the job, and goes on in
# the same folder when the job starts again.
#SBATCH --job-name=vlightning
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=24:00:00
#SBATCH --signal=SIGUSR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.out
set -euo pipefail

export OMP_NUM_THREADS=1 # threads of a process that computes on a GPU; loader workers take the other cores
exec srun --kill-on-bad-exit=1 vlightning fit "$@" \
  --trainer.num_nodes="$SLURM_JOB_NUM_NODES" --trainer.devices="$SLURM_NTASKS_PER_NODE"
