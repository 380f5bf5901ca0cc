#!/bin/bash
# A queue whose jobs are pre-empted. What follows the script's name goes to `vlightning fit`:
#   sbatch --partition=<the queue's> configs/slurm/preemptible.sh --config configs/shre/distill.yaml
# SLURM sends SIGTERM, waits for the partition's GraceTime or for KillWait, and kills (PreemptMode=REQUEUE). The run
# writes a checkpoint on SIGTERM, and the job goes on from it. At the end of its time it requeues itself (SIGUSR1).
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
# To SLURM, a job that made room within the grace time has failed, and is not requeued: 143 is 128 + SIGTERM's 15.
if ((status == 143)); then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
