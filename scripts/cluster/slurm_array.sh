#!/usr/bin/env bash
# Slurm: one rank for each job of an array, each in a directory of its own under OUT.ranks, on a file system
# that all nodes see. The array has as many jobs as there are ranks:
#
#   job=$(sbatch --parsable --array=0-7 slurm_array.sh GGUF OUT --tp 8)
#   sbatch --dependency="afterok:$job" slurm_merge.sh OUT
#
# What follows OUT goes to `preshard convert`. A job that is requeued goes on where it was.
#SBATCH --job-name=preshard
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=16
#SBATCH --mem=4G
#SBATCH --requeue
set -euo pipefail
source=$1 out=$2
shift 2
exec preshard convert "$source" --ranks env -o "$out.ranks/$SLURM_ARRAY_TASK_ID" "$@"
