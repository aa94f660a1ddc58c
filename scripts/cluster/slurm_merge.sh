#!/usr/bin/env bash
# Slurm: joins what the jobs of slurm_array.sh wrote.
#
#   sbatch --dependency="afterok:$job" slurm_merge.sh OUT
#SBATCH --job-name=preshard-merge
#SBATCH --ntasks=1
#SBATCH --mem=4G
set -euo pipefail
exec preshard merge "$1".ranks/* -o "$1"
