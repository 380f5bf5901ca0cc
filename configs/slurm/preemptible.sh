#!/bin/bash
# A pre-emptible partition. Arguments after the script's name are passed to `vlightning fit`:
#   sbatch --partition=<name> configs/slurm/preemptible.sh --config configs/albef/base.yaml --config configs/albef/pretrain_4m.yaml
# SLURM sends SIGTERM, waits for the partition's GraceTime or for KillWait, and kills (PreemptMode=REQUEUE). The run
# writes a checkpoint on SIGTERM, from which the job resumes. At its time limit the job requeues itself (SIGUSR1).
#SBATCH --job-name=vlightning
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=04:00:00
#SBATCH --signal=SIGUSR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.out
set -euo pipefail

export OMP_NUM_THREADS=1 # threads of a process that computes on a GPU; loader workers take the other cores
status=0
srun --kill-on-bad-exit=1 vlightning fit "$@" \
  --trainer.num_nodes="$SLURM_JOB_NUM_NODES" --trainer.devices="$SLURM_NTASKS_PER_NODE" || status=$?
# SLURM marks a job that exits within the grace time as failed, and does not requeue it. 143 is 128 + 15 (SIGTERM).
if ((status == 143)); then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
