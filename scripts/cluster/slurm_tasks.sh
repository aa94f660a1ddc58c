#!/usr/bin/env bash
# Slurm: one job, one rank for each of its processes, then the merge. The job has as many processes as there
# are ranks:
#
#   sbatch --ntasks=8 slurm_tasks.sh GGUF OUT --tp 8
#
# What follows OUT goes to `preshard convert`. A job that is requeued goes on where it was.
#SBATCH --job-name=preshard
#SBATCH --cpus-per-task=16
#SBATCH --mem-per-cpu=256M
#SBATCH --requeue
set -euo pipefail
source=$1 out=$2
shift 2
# Each process names its directory by its own number, so the shell that reads it runs in the process.
srun --kill-on-bad-exit=1 bash -c 'out=$1; shift; exec preshard convert "$@" -o "$out.ranks/$SLURM_PROCID"' \
  preshard "$out" "$source" --ranks env "$@"
exec preshard merge "$out".ranks/* -o "$out"
