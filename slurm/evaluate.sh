#!/usr/bin/env bash
# The perplexity of a checkpoint on all GPUs of a job; the figures do not depend on how many there are.
#
#   sbatch slurm/evaluate.sh --checkpoint runs/owt_small --data data/openwebtext/validation --json owt.json
#   sbatch -N 2 slurm/evaluate.sh --compare runs/a runs/b --data data/openwebtext/validation
#
#SBATCH --job-name=mdlm-evaluate
#SBATCH --nodes=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-gpu=8
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%x-%j.out
cd "${SLURM_SUBMIT_DIR:-.}" && [ -f slurm/common.sh ] ||
  { echo "submitted from ${SLURM_SUBMIT_DIR:-$PWD}, which is not the repository of mdlm_scale, or not seen on $HOSTNAME:" \
    "cd there, then sbatch slurm/..." >&2; exit 2; }
source slurm/common.sh
evaluate "$@"
