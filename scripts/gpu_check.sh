#!/usr/bin/env bash
# What CI cannot do: the GPU tests, compute-sanitizer, the benchmarks and the demo, on a machine
# with a CUDA device.
#
#     scripts/gpu_check.sh [tests] [sanitize] [bench] [demo]        # all four without arguments
#
# Logs and results go to $OUT (default: out). Every step runs whatever became of the one before; the exit status is 1
# if any failed. Python packages that the machine lacks are taken from wheels in .whl, where there are some; what the
# machine has of its own is never replaced. Settings: PYTHON, OUT, SITE, DEVICE (cuda:0), BENCH_ARGS, DEMO_ARGS,
# PYTEST_ARGS, PINSTAGE_COMMIT.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

PYTHON=${PYTHON:-python3}
OUT=${OUT:-out}
SITE=${SITE:-/tmp/site}
DEVICE=${DEVICE:-cuda:0}
mkdir -p "$OUT"
summary=$OUT/summary.txt
: >"$summary"

export PYTHONUNBUFFERED=1 PINSTAGE_REQUIRE_GPU=1
export PYTHONPATH=$PWD/src:$SITE${PYTHONPATH:+:$PYTHONPATH}

say() { echo "$*" | tee -a "$summary"; }

# The wheels in .whl whose packages are not installed, or only in $SITE.
missing_wheels() {
  "$PYTHON" - "$SITE" <<'PY'
import re, sys
from importlib.metadata import distributions
from pathlib import Path

site = Path(sys.argv[1]).resolve()
paths = [entry for entry in sys.path if Path(entry).resolve() != site]
have = {re.sub(r"[-_.]+", "-", d.metadata["Name"]).lower() for d in distributions(path=paths) if d.metadata["Name"]}
for wheel in sorted(Path(".whl").glob("*.whl")):
    if re.sub(r"[-_.]+", "-", wheel.name.split("-")[0]).lower() not in have:
        print(wheel)
PY
}

install() {
  compgen -G '.whl/*.whl' >/dev/null || return 0
  local wheels
  mapfile -t wheels < <(missing_wheels)
  [ ${#wheels[@]} -gt 0 ] || return 0
  echo "from wheels: ${wheels[*]##*/}"
  say "${#wheels[@]} packages from wheels"
  "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --disable-pip-version-check \
    --upgrade --target "$SITE" "${wheels[@]}"
}

# step LOG NAME SECONDS COMMAND...: run it, append its output to $OUT/LOG.log, note how it went.
failed=0
step() {
  local log=$OUT/$1.log name=$2 limit=$3 began=$SECONDS status
  shift 3
  echo "== $name: $*" | tee -a "$log"
  timeout --kill-after=10 "$limit" "$@" 2>&1 | tee -a "$log"
  status=${PIPESTATUS[0]}
  [ "$status" -eq 0 ] || failed=1
  say "$(printf '%-24s exit %-3s %4s s' "$name" "$status" "$((SECONDS - began))")"
}

tests() {
  # shellcheck disable=SC2086
  step tests tests 400 "$PYTHON" -m pytest tests/gpu -p no:cacheprovider --durations=10 ${PYTEST_ARGS:-}
}

sanitize() {
  local run=("$PYTHON" benchmarks/sanitize_run.py --device "$DEVICE")
  local memcheck=(compute-sanitizer --tool memcheck --target-processes all "${run[@]}")
  export PYTORCH_NO_CUDA_MEMORY_CACHING=1
  step sanitize sanitize-baseline 120 "${memcheck[@]}" --baseline
  step sanitize sanitize 180 "${memcheck[@]}"
  unset PYTORCH_NO_CUDA_MEMORY_CACHING
  grep 'ERROR SUMMARY' "$OUT/sanitize.log" | tee -a "$summary"
  # cuda-python asks the driver for functions that are newer than it when it is loaded, and memcheck reports each refusal.
  # Anything else is an error.
  if grep -E '^========= (Invalid|Leaked|Program hit)' "$OUT/sanitize.log" | grep -v 'cuGetProcAddress'; then
    say "memcheck found errors"
    failed=1
  fi
  [ "$(grep -c 'ERROR SUMMARY' "$OUT/sanitize.log")" -eq 2 ] || { say "memcheck did not finish"; failed=1; }
}

benchmark() {
  step bench "$1" "$2" "$PYTHON" "benchmarks/$3" --device "$DEVICE" --out "$OUT/$1.json" "${@:4}"
}

bench() {
  # shellcheck disable=SC2086
  benchmark staging 330 run.py ${BENCH_ARGS:-}
  benchmark memory_startup 120 memory_startup.py --rounds 2
  benchmark pool_latency 60 pool_latency.py
}

demo() {
  # shellcheck disable=SC2086
  step demo demo 180 "$PYTHON" -m pinstage._cli demo ${DEMO_ARGS:-}
}

[ $# -gt 0 ] || set -- tests sanitize bench demo
for name; do
  case $name in
    tests | sanitize | bench | demo) rm -f "$OUT/$name.log" ;;
    *) echo "$0: no such step: $name; there are tests, sanitize, bench, demo" >&2; exit 2 ;;
  esac
done

say "$("$PYTHON" -c 'import sys, torch; print("python", sys.version.split()[0], "torch", torch.__version__)')"
say "$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null || echo 'no GPU')"
install || { say "installing the wheels failed"; failed=1; }
for name; do "$name"; done
echo "== summary"
cat "$summary"
exit "$failed"
