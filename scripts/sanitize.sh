#!/usr/bin/env bash
# The extension under gcc's sanitizers. `make sanitize` calls it:
#
#     scripts/sanitize.sh TEST...        # files for pytest
#
# 1. tests/native/pack_stress.c, which is packing without Python: as it is, under ASan with UBSan and LSan, under TSan.
# 2. The whole extension under ASan with UBSan, in a copy of the package in build/sanitize: tests/smoke.py, and the tests
#    that are named. Leaks are not looked for there: CPython and torch keep memory to their end.
#
# A warning of the compiler is an error. Settings: PYTHON (.venv/bin/python), CC (cc).
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-.venv/bin/python}
export CC=${CC:-cc}
build=build/sanitize
rm -rf "$build"
mkdir -p "$build"

memory=(-g -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer)
export UBSAN_OPTIONS=print_stacktrace=1

# stress NAME ROUNDS FLAG...: other batches each time; `pack_stress-NAME ROUNDS SEED` repeats them.
stress() {
  local program=$build/pack_stress-$1 seed=$RANDOM$RANDOM began=$SECONDS
  "$CC" -std=gnu11 -Wall -Wextra -Werror "${@:3}" tests/native/pack_stress.c src/pinstage/_native/pack.c -o "$program" -lpthread
  echo "== $program $2 $seed"
  timeout 300 "$program" "$2" "$seed"
  echo "   $((SECONDS - began)) s"
}

stress plain 100 -O2
stress memory 40 -O1 "${memory[@]}"
stress threads 10 -O1 -g -fsanitize=thread

began=$SECONDS
echo "== the extension, with ${memory[*]}"
PINSTAGE_NATIVE=1 CFLAGS="-Werror ${memory[*]}" "$PYTHON" setup.py -q build --build-base "$build" 2>&1
# Both before all else in a process. libstdc++: ASan looks for its functions when it begins, before torch brings it.
libraries=$("$CC" -print-file-name=libasan.so):$("$CC" -print-file-name=libstdc++.so.6)
package=$(echo "$PWD/$build"/lib.*)
# PYTHONMALLOC: so that ASan sees the ends of objects of Python.
sanitized=(env LD_PRELOAD="$libraries" ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc PYTHONPATH="$package" "$PYTHON")
"${sanitized[@]}" tests/smoke.py "$package"
[ $# -eq 0 ] || "${sanitized[@]}" -m pytest -q -p no:cacheprovider "$@"
echo "   $((SECONDS - began)) s"
