#!/usr/bin/env bash
# Run the tests: install what they need into .venv, then the suite.
#
#   bash tools/test.sh              minutes
#   bash tools/test.sh --all        with the slow parts
#   bash tools/test.sh -k noise     other arguments go to pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash tools/install.sh --test
select=(-m "not slow")
if [ "${1:-}" = --all ]; then select=(); shift; fi
exec .venv/bin/python -m pytest --durations=20 "${select[@]}" "$@"
