#!/usr/bin/env bash
# Install the wheel of dist/ for this machine into a fresh environment and run tests/helpers/smoke.py there.
#
#     scripts/try_wheel.sh PYTHON...     # such as python3.11 python3.14; each in its own environment
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || { echo "$0: missing PYTHON, such as python3.11" >&2; exit 2; }
shopt -s nullglob
wheels=(dist/*_"$(uname -m)".whl)
[ ${#wheels[@]} -eq 1 ] || { echo "$0: ${#wheels[@]} wheels for $(uname -m) in dist/: run make wheels" >&2; exit 2; }

place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
for python; do
  echo "== a fresh environment of $("$python" --version)"
  "$python" -m venv "$place/venv" --clear
  "$place/venv/bin/python" -m pip install -q --disable-pip-version-check -c constraints.txt "${wheels[0]}"
  site=$("$place/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  here=$PWD
  (cd "$place" && venv/bin/python -I "$here/tests/helpers/smoke.py" "$site" && venv/bin/pinstage --version)
done
