#!/usr/bin/env bash
# OpenWebText as shards: fetched from the Hugging Face hub, tokenised by all cores of one machine, into data/openwebtext.
#
#   sbatch slurm/prepare_owt.sh
#   sbatch slurm/prepare_owt.sh --input downloads/openwebtext        from local copies of its files; any option of the tool
#   sbatch slurm/prepare_owt.sh --recipe lm1b --output data/lm1b     another data set
#
#SBATCH --job-name=mdlm-prepare
#SBATCH --nodes=1
#SBATCH --cpus-per-task=32
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%x-%j.out
cd "${SLURM_SUBMIT_DIR:-.}" && [ -f slurm/common.sh ] ||
  { echo "submitted from ${SLURM_SUBMIT_DIR:-$PWD}, which is not the repository of mdlm_scale, or not seen on $HOSTNAME:" \
    "cd there, then sbatch slurm/..." >&2; exit 2; }
source slurm/common.sh
prepare --recipe openwebtext --output data/openwebtext --workers "${SLURM_CPUS_PER_TASK:-$(nproc)}" "$@"
