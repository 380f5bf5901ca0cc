#!/bin/bash
# Several nodes, one process per GPU. Arguments after the script's name are passed to `vlightning fit`:
#   sbatch configs/slurm/many_nodes.sh --config configs/albef/base.yaml --config configs/albef/pretrain_4m.yaml
# Five minutes before the time limit SLURM sends SIGUSR1; the run writes a checkpoint and requeues the job, which resumes
# in the same folder.
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
