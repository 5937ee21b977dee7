#!/usr/bin/env bash
# From nothing to samples: install into .venv, turn Python's documentation into shards, train a small model for a few
# minutes, print its perplexity and samples.
#
#   bash tools/quickstart.sh [section.key=value ...]     e.g. train.num_steps=100
#
# Run again it resumes, or, if it was finished, only samples. `rm -r runs/quickstart` starts afresh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash tools/install.sh
.venv/bin/python tools/prepare_data.py --recipe python --output data/quickstart
.venv/bin/python -m mdlm_scale.train --config configs/quickstart.yaml "$@"
dir=$(printf '%s\n' "$@" | sed -n 's/^run\.dir=//p' | tail -n 1); dir=${dir:-runs/quickstart}
echo
.venv/bin/python -m mdlm_scale.sample --checkpoint "$dir" --num 3
.venv/bin/python - "$dir/metrics.jsonl" <<'PYTHON'
import json, sys
last = [row for row in map(json.loads, open(sys.argv[1])) if row["kind"] == "eval"][-1]
print(f"""
Validation perplexity {last["ppl"]:.2f} +- {last["ppl_se"]:.2f} per byte (standard error; {last["num_rows"]} rows, EMA weights).
A model that ignores the context could reach {last["unigram_ppl"]:.2f} at best (unigram perplexity of the same rows).""")
PYTHON
echo "
checkpoint  $(ls -d "$dir"/checkpoints/step-* | tail -n 1)
config      $dir/config.yaml
log         $dir/log.txt, and the figures in $dir/metrics.jsonl
more text   .venv/bin/python -m mdlm_scale.sample --checkpoint $dir --num 10"
