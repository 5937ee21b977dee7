#!/usr/bin/env bash
# Install mdlm_scale and all it needs into a virtual environment: the one installer of quick start, tests and clusters.
#
#   bash tools/install.sh                 into .venv, made if missing
#   VENV=/path bash tools/install.sh      into another environment (PYTHON=python3.12 chooses the interpreter)
#   bash tools/install.sh --test          with what the tests need
#
# A second call with nothing changed returns at once.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${VENV:-.venv} python=${PYTHON:-python3} extras=""
case "${1:-}" in
  "") ;;
  --test) extras="[test]" ;;
  *) echo "install.sh: unknown option '$1'; the only one is --test" >&2; exit 2 ;;
esac
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  { echo "install.sh: '$python' is $("$python" -V 2>&1); Python 3.11 or newer is needed: PYTHON=python3.11 bash tools/install.sh" >&2; exit 2; }

# Installing again is needed when one of these files has changed, or when the test packages were not asked for before.
stamp="$(cat pyproject.toml tools/constraints.txt tools/install.sh | sha256sum | cut -d' ' -f1)"
case "$(cat "$venv/.installed" 2>/dev/null)" in "$stamp$extras" | "$stamp[test]") exit 0 ;; esac

[ -x "$venv/bin/python" ] || { echo "install.sh: making $venv"; "$python" -m venv "$venv"; }
pip() { PIP_DISABLE_PIP_VERSION_CHECK=1 DS_BUILD_OPS=0 "$venv/bin/python" -m pip install -q -c tools/constraints.txt "$@"; }
echo "install.sh: installing into $venv (a few minutes the first time)"
pip "$(grep '^torch==' tools/constraints.txt)"       # first, so that no later package chooses another build of it
pip -e ".$extras"
pip Brotli python-snappy zstd xxhash catalogue boto3 pillow requests
pip --no-deps mosaicml-streaming    # its pins hold numpy and transformers back and pull in a torchvision we never import
echo "$stamp$extras" > "$venv/.installed"
