#!/usr/bin/env bash
# Build the source distribution, and from it the wheels for Linux on x86_64 and aarch64, into dist/. `make wheels` calls it.
#
# The compiler is zig, from `ziglang` on PyPI: it targets both machines, and links against a chosen version of glibc.
# auditwheel checks the platform in a wheel's name, abi3audit its use of the limited API. scripts/try_wheel.sh tests the
# wheel for this machine.
#
# Settings: PYTHON (.venv/bin/python, which has the group `wheels`); PINSTAGE_REPOSITORY, see setup.py.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=$(realpath -s "${PYTHON:-.venv/bin/python}")
GLIBC=2.28 # as in torch's own wheels
build=$PWD/build/wheels
export ZIG_GLOBAL_CACHE_DIR=${ZIG_GLOBAL_CACHE_DIR:-$PWD/build/zig} # else in the home folder, which may be read-only
rm -rf "$build" dist
mkdir -p "$build/source" dist

"$PYTHON" setup.py -q sdist
tar -xf dist/*.tar.gz -C "$build/source" --strip-components=1

for machine in x86_64 aarch64; do
  platform=manylinux_${GLIBC/./_}_$machine
  echo "== $platform"
  compiler="'$PYTHON' -m ziglang cc -target $machine-linux-gnu.$GLIBC"
  # -s leaves out the debug information of zig's runtime. _PYTHON_HOST_PLATFORM is the target machine.
  CC=$compiler LDSHARED="$compiler -shared -s" CFLAGS=-Werror _PYTHON_HOST_PLATFORM=linux-$machine \
    "$PYTHON" -m pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation \
    --config-settings=--build-option="--plat-name=$platform" -w dist "$build/source"
  wheel=$(echo dist/*-cp311-abi3-"$platform".whl)
  verdict=$("$PYTHON" -m auditwheel show "$wheel")
  # A wheel may need an older glibc than it is built for.
  [[ $verdict =~ \"manylinux_2_([0-9]+)_$machine\" && ${BASH_REMATCH[1]} -le ${GLIBC#2.} ]] || { echo "$0: $wheel: $verdict" >&2; exit 1; }
  "$PYTHON" -m abi3audit --strict --summary "$wheel"
done
"$PYTHON" -m twine check --strict dist/*
ls -l dist

scripts/try_wheel.sh "$PYTHON"
