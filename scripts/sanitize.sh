#!/usr/bin/env bash
# Test the extension under gcc's sanitizers. `make sanitize` calls it:
#
#     scripts/sanitize.sh                  # with the tests of layouts, containers and copying
#     scripts/sanitize.sh TEST...          # with other tests: arguments of pytest
#
# 1. tests/native/pack_stress.c, packing without Python: plain, under ASan with UBSan and LSan, and under TSan.
# 2. The whole extension under ASan with UBSan, in a copy of the package in build/sanitize: tests/helpers/smoke.py, then pytest.
#    Leaks are not checked there: CPython and torch keep memory until they exit.
#
# Findings, also in processes that tests start, are printed at the end, and make the script fail.
#
# Compiler warnings are errors, and so is a missing sanitizer. Settings: PYTHON (.venv/bin/python), CC (cc).
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-.venv/bin/python}
export CC=${CC:-cc}
[ $# -gt 0 ] || set -- tests/batch
build=build/sanitize
rm -rf "$build"
mkdir -p "$build"

memory=(-g -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer)
export UBSAN_OPTIONS=print_stacktrace=1

finish() {
  local status=$?
  for report in "$build"/report.*; do
    [ -e "$report" ] || continue
    printf '\n== %s\n' "$report"
    cat "$report"
    [ "$status" -ne 0 ] || status=1
  done
  [ "$status" -eq 0 ] || echo "$0: exit status $status" >&2
  exit "$status"
}
trap finish EXIT

# stress NAME ROUNDS FLAG...: random batches; `pack_stress-NAME ROUNDS SEED` repeats them.
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
# UBSan is linked statically and hidden: as a library it would call ASan's functions of the same names, and set ASan's
# report file instead of its own.
CFLAGS="-Werror ${memory[*]} -static-libubsan -Wl,--exclude-libs,ALL" "$PYTHON" setup.py -q build --build-base "$build"
# Both libraries are loaded first. ASan looks up functions of libstdc++ when it starts, before torch loads it.
libraries=$("$CC" -print-file-name=libasan.so):$("$CC" -print-file-name=libstdc++.so.6)
package=$(echo "$PWD/$build"/lib.*)
nm -D "$package"/pinstage/_native/_core.abi3.so | grep __asan_init >/dev/null || { echo "$0: setup.py has built it without the sanitizers" >&2; exit 1; }
# Reports go to files: pytest captures stderr, and a crash would lose it.
log="log_path='$PWD/$build/report'" # in quotes, since the path may have spaces
# PYTHONMALLOC lets ASan see the bounds of Python's objects.
sanitized=(env LD_PRELOAD="$libraries" ASAN_OPTIONS="detect_leaks=0:handle_abort=1:$log" UBSAN_OPTIONS="$UBSAN_OPTIONS:$log"
  PYTHONMALLOC=malloc PYTHONPATH="$package" "$PYTHON")
"${sanitized[@]}" tests/helpers/smoke.py "$package"
"${sanitized[@]}" -m pytest -q -p no:cacheprovider --timeout=600 "$@"
echo "   $((SECONDS - began)) s"
