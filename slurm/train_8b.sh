#!/usr/bin/env bash
# A model of 8 billion parameters, from start to finish: stopped by anything but scancel, it goes on by itself.
#
#   sbatch slurm/train_8b.sh                               8 nodes x 8 GPUs; arguments and options as of train_owt.sh
#
#SBATCH --job-name=mdlm-8b
#SBATCH --nodes=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-gpu=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=B:USR1@180
#SBATCH --open-mode=append
#SBATCH --output=slurm-%x-%j.out
cd "${SLURM_SUBMIT_DIR:-.}" && [ -f slurm/common.sh ] ||
  { echo "submitted from ${SLURM_SUBMIT_DIR:-$PWD}, which is not the repository of mdlm_scale, or not seen on $HOSTNAME:" \
    "cd there, then sbatch slurm/..." >&2; exit 2; }
source slurm/common.sh
train configs/8b.yaml "$@"
