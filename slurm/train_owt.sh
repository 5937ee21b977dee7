#!/usr/bin/env bash
# The paper's OpenWebText recipe, from start to finish: stopped by anything but scancel, it goes on by itself.
#
#   sbatch slurm/prepare_owt.sh                                       the data, once
#   sbatch slurm/train_owt.sh                                         1 node x 8 GPUs
#   sbatch -N 4 slurm/train_owt.sh optimizer.lr=2e-4                  sbatch's options before, overrides behind
#   sbatch -N 2 --gpus-per-node=4 slurm/train_owt.sh --config configs/mine.yaml --torchrun
#   bash slurm/train_owt.sh -N 4 optimizer.lr=2e-4                    check here first, then submit the same
#
#SBATCH --job-name=mdlm-owt
#SBATCH --nodes=1
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
train configs/owt_small.yaml "$@"
