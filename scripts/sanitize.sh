#!/usr/bin/env bash
# The extension under gcc's sanitizers. `make sanitize` calls it:
#
#     scripts/sanitize.sh                  # with the tests of layouts, containers and copying
#     scripts/sanitize.sh TEST...          # with other ones: arguments of pytest
#
# 1. tests/native/pack_stress.c, which is packing without Python: as it is, under ASan with UBSan and LSan, under TSan.
# 2. The whole extension under ASan with UBSan, in a copy of the package in build/sanitize: tests/helpers/smoke.py, then pytest.
#    Leaks are not looked for there: CPython and torch keep memory to their end.
#
# What they find, here or in a process that a test has started, is printed at the end, and makes this fail.
#
# A warning of the compiler is an error, and so is a sanitizer that it lacks. Settings: PYTHON (.venv/bin/python), CC (cc).
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
# UBSan in the extension itself, hidden: as a library it would call ASan's functions of the same names, and set ASan's file
# for reports in place of its own.
CFLAGS="-Werror ${memory[*]} -static-libubsan -Wl,--exclude-libs,ALL" "$PYTHON" setup.py -q build --build-base "$build"
# Both before all else in a process. libstdc++: ASan looks for its functions when it begins, before torch brings it.
libraries=$("$CC" -print-file-name=libasan.so):$("$CC" -print-file-name=libstdc++.so.6)
package=$(echo "$PWD/$build"/lib.*)
nm -D "$package"/pinstage/_native/_core.abi3.so | grep __asan_init >/dev/null || { echo "$0: setup.py has built it without the sanitizers" >&2; exit 1; }
# In files: pytest keeps what is written to stderr, and dies with it.
log=log_path=$PWD/$build/report
# PYTHONMALLOC: so that ASan sees the ends of objects of Python.
sanitized=(env LD_PRELOAD="$libraries" ASAN_OPTIONS="detect_leaks=0:handle_abort=1:$log" UBSAN_OPTIONS="$UBSAN_OPTIONS:$log"
  PYTHONMALLOC=malloc PYTHONPATH="$package" "$PYTHON")
"${sanitized[@]}" tests/helpers/smoke.py "$package"
"${sanitized[@]}" -m pytest -q -p no:cacheprovider --timeout=600 "$@"
echo "   $((SECONDS - began)) s"
