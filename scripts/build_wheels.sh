#!/usr/bin/env bash
# The source distribution, and from it the wheels for Linux on x86_64 and aarch64, into dist/. `make wheels` calls it.
#
# The compiler is zig's, of PyPI's package `ziglang`: it is for both machines, and links to a glibc as old as is asked for.
# auditwheel says whether a wheel keeps to what its name promises, abi3audit whether it keeps to the limited API. The wheel
# for this machine is tried by scripts/try_wheel.sh.
#
# Settings: PYTHON (.venv/bin/python, which has the group `wheels`); PINSTAGE_REPOSITORY, see setup.py.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=$(realpath -s "${PYTHON:-.venv/bin/python}")
GLIBC=2.28 # that of torch's own wheels
build=$PWD/build/wheels
rm -rf "$build" dist
mkdir -p "$build/source" dist

"$PYTHON" setup.py -q sdist
tar -xf dist/*.tar.gz -C "$build/source" --strip-components=1

for machine in x86_64 aarch64; do
  platform=manylinux_${GLIBC/./_}_$machine
  echo "== $platform"
  compiler="$PYTHON -m ziglang cc -target $machine-linux-gnu.$GLIBC"
  # -s: without the debug information of zig's own runtime. _PYTHON_HOST_PLATFORM: the machine that is built for.
  CC=$compiler LDSHARED="$compiler -shared -s" CFLAGS=-Werror _PYTHON_HOST_PLATFORM=linux-$machine \
    "$PYTHON" -m pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation \
    --config-settings=--build-option="--plat-name=$platform" -w dist "$build/source"
  wheel=$(echo dist/*-cp311-abi3-"$platform".whl)
  verdict=$("$PYTHON" -m auditwheel show "$wheel")
  # It may need less than it is built for.
  [[ $verdict =~ \"manylinux_2_([0-9]+)_$machine\" && ${BASH_REMATCH[1]} -le ${GLIBC#2.} ]] || { echo "$0: $wheel: $verdict" >&2; exit 1; }
  "$PYTHON" -m abi3audit --strict --summary "$wheel"
done
"$PYTHON" -m twine check --strict dist/*
ls -l dist

scripts/try_wheel.sh "$PYTHON"
