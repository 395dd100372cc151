#!/usr/bin/env bash
# Run what CI cannot: the GPU tests, compute-sanitizer, the benchmarks and the demo, on a machine with a CUDA device.
#
#     scripts/gpu_check.sh [tests] [sanitize] [bench] [demo]        # all four without arguments
#     scripts/gpu_check.sh loader to_host                           # some benchmarks, one step each, see below
#     scripts/gpu_check.sh distributed                              # needs two devices
#     scripts/gpu_check.sh series                                   # how times grow with the batch; takes minutes, draws a picture
#     scripts/gpu_check.sh frameworks                               # training loops; needs Lightning, Accelerate and PyG
#     scripts/gpu_check.sh cases                                    # the case studies of the docs, and their traces
#     scripts/gpu_check.sh doctor                                   # the output of pinstage doctor, and its picture
#     scripts/gpu_check.sh promises                                 # savings that pinstage trace promises, and measured ones
#
# Logs and results are written to $OUT (default: out). With PACK=1 the results are one file, results.tar.gz, rewritten every
# 15 seconds: for machines that return few files, and kill a command that takes too long. All benchmarks together take
# more than 40 minutes. A failed step doesn't stop the others; the exit status is 1 if any failed. Missing Python packages
# are installed from wheels in .whl, if there are any (scripts/wheels.sh); packages of the machine are never replaced. The
# extension is compiled first; if that fails, an existing binary is used.
# Settings: PYTHON, OUT, SITE, DEVICE (cuda:0), LIMIT (most seconds per step), BENCH_ARGS, LOADER_ARGS, LOOPS_ARGS,
# FRAMEWORKS_ARGS, PAGE_LOCKING_ARGS, DEMO_ARGS, PINSTAGE_COMMIT, PYTEST_ARGS: '-n 7 --dist worksteal' runs the tests in 100 s on 16 CPUs.
# The C++ rival is in $RIVAL_SITE (.rival or /tmp/rival). If ACCV_LAB is set, scripts/build_rival.sh builds it there.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

PYTHON=${PYTHON:-python3}
OUT=${OUT:-out}
SITE=${SITE:-/tmp/site}
DEVICE=${DEVICE:-cuda:0}
mkdir -p "$OUT"
RESULTS=$OUT
[ -z "${PACK:-}" ] || RESULTS=$(mktemp -d)
summary=$OUT/summary.txt
: >"$summary"

export PYTHONUNBUFFERED=1 PINSTAGE_REQUIRE_GPU=1
[ -d .rival/accvlab ] && RIVAL_SITE=${RIVAL_SITE:-$PWD/.rival}
export RIVAL_SITE=${RIVAL_SITE:-/tmp/rival} PYTHON
export PYTHONPATH=$PWD/src:$SITE:$RIVAL_SITE${PYTHONPATH:+:$PYTHONPATH}

say() { echo "$*" | tee -a "$summary"; }

pack() { tar -czf "$RESULTS.tar.gz" -C "$RESULTS" . && mv "$RESULTS.tar.gz" "$OUT/results.tar.gz"; }

if [ -n "${PACK:-}" ]; then
  while sleep 15; do pack; done >/dev/null 2>&1 & # otherwise its sleep keeps our output open
  trap "kill $!; pack" EXIT
fi

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

# Calls the compiler directly: the machine's setuptools may be older than pyproject.toml needs.
extension() {
  local folder=src/pinstage/_native include
  include=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("include"))')
  if "${CC:-cc}" -std=gnu11 -O3 -fvisibility=hidden -fPIC -shared -I"$include" "$folder"/*.c -o "$folder/_core.new" \
    -ldl -lpthread 2>&1 | tee "$OUT/extension.log"; then
    mv "$folder/_core.new" "$folder/_core.abi3.so"
    say "extension: compiled here"
  elif [ -f "$folder/_core.abi3.so" ]; then
    say "extension: the existing binary"
  fi
  "$PYTHON" -c 'from pinstage.inspect._doctor import private_names; raise SystemExit([c for c in private_names() if c.remedy] or None)' 2>&1 | tee -a "$OUT/extension.log"
}

# step LOG NAME SECONDS COMMAND...: run it, append its output to $OUT/LOG.log, record its status and time.
failed=0
step() {
  local log=$OUT/$1.log name=$2 limit=$3 began=$SECONDS status
  shift 3
  [ "$limit" -le "${LIMIT:-$limit}" ] || limit=$LIMIT
  echo "== $name: $*" | tee -a "$log"
  timeout --kill-after=10 "$limit" "$@" 2>&1 | tee -a "$log"
  status=${PIPESTATUS[0]}
  [ "$status" -eq 0 ] || failed=1
  say "$(printf '%-24s exit %-3s %4s s' "$name" "$status" "$((SECONDS - began))")"
}

tests() {
  # shellcheck disable=SC2086
  step tests tests 540 "$PYTHON" -m pytest tests/gpu -p no:cacheprovider -p no:benchmark --durations=10 ${PYTEST_ARGS:-}
}

# Needs two GPUs, and fails without them. The other steps skip these tests on a single GPU.
distributed() {
  # shellcheck disable=SC2086
  PINSTAGE_REQUIRE_GPU=2 step distributed distributed 500 "$PYTHON" -m pytest tests/gpu/test_distributed.py \
    -p no:cacheprovider -p no:benchmark --durations=10 ${PYTEST_ARGS:-}
}

sanitize() {
  local run=("$PYTHON" benchmarks/sanitize_run.py --device "$DEVICE")
  local memcheck=(compute-sanitizer --tool memcheck --target-processes all "${run[@]}")
  export PYTORCH_NO_CUDA_MEMORY_CACHING=1
  step sanitize sanitize-baseline 120 "${memcheck[@]}" --baseline
  step sanitize sanitize 180 "${memcheck[@]}"
  unset PYTORCH_NO_CUDA_MEMORY_CACHING
  grep 'ERROR SUMMARY' "$OUT/sanitize.log" | tee -a "$summary"
  # While it loads, cuda-python asks for functions that an older driver lacks, and memcheck reports each refusal. Anything
  # else is an error.
  if grep -E '^========= (Invalid|Leaked|Program hit)' "$OUT/sanitize.log" | grep -v 'cuGetProcAddress'; then
    say "memcheck found errors"
    failed=1
  fi
  [ "$(grep -c 'ERROR SUMMARY' "$OUT/sanitize.log")" -eq 2 ] || { say "memcheck did not finish"; failed=1; }
}

# benchmark NAME SECONDS OPTION...: a script of benchmarks/.
benchmark() {
  step bench "$1" "$2" "$PYTHON" "benchmarks/$1.py" --device "$DEVICE" --out "$RESULTS/$1.json" "${@:3}"
}

# comparison NAME SECONDS OPTION...: benchmarks/comparison.
comparison() {
  step bench "$1" "$2" "$PYTHON" benchmarks/comparison --device "$DEVICE" --out "$RESULTS/$1.json" "${@:3}"
}

rival() {
  [ -z "${ACCV_LAB:-}" ] || step bench rival 300 scripts/build_rival.sh
}

staging() {
  rival
  # shellcheck disable=SC2086
  comparison staging 560 ${BENCH_ARGS:-}
}

# Without `pin_to`, which took 225 s: up to 8 ms per leaf.
staging_busy() {
  rival
  # shellcheck disable=SC2086
  comparison staging_busy 560 --busy $(($(nproc) / 2)) --seconds 0.1 \
    --only to,multi_tensor_copier,multi_tensor_copier_openmp,pinstage ${BENCH_ARGS:-}
}

memory_startup() { benchmark memory_startup 120 --rounds 2; }
# 48 GiB on a machine of 128 GiB. Medians of five runs take 20 minutes: PAGE_LOCKING_ARGS='--repeats 5 --only ...' way by way.
# shellcheck disable=SC2086
page_locking() { benchmark page_locking 480 ${PAGE_LOCKING_ARGS:-}; }
pool_latency() { benchmark pool_latency 60; }
refusals() { benchmark refusals 120; }
# shellcheck disable=SC2086
loader() { benchmark loader 400 ${LOADER_ARGS:-}; }
loader_refused() { benchmark loader_refused 300; }
# shellcheck disable=SC2086
loops() { benchmark loops 400 ${LOOPS_ARGS:-}; }
in_memory() { benchmark in_memory 240; }
to_host() { benchmark to_host 180; }
page_locked() { benchmark page_locked 120; }
out() { benchmark out 120; }
checkpoint() { benchmark checkpoint 600; }
offload() { benchmark offload 300; }
frozen() { benchmark frozen 540; } # the rows of its rivals need diffusers and accelerate
weights() { benchmark weights 480; } # all rows need safetensors
rounding_waste() { benchmark rounding_waste 90; }
native_threads() { benchmark native_threads 120; }
# shellcheck disable=SC2086
frameworks() { benchmark frameworks 400 ${FRAMEWORKS_ARGS:-}; } # not part of bench: needs lightning, accelerate and PyG

BENCHMARKS=(
  staging staging_busy memory_startup page_locking pool_latency loader loader_refused in_memory loops page_locked to_host out checkpoint
  offload frozen weights rounding_waste native_threads refusals
)

bench() {
  local one
  for one in "${BENCHMARKS[@]}"; do "$one"; done
}

# Without the ways that are slower than another way of the same package.
series() {
  rival
  # shellcheck disable=SC2086
  comparison series 580 --series all --rounds 1 --repeats 20 --seconds 0.1 --timeout 120 --only \
    to,pin_to,tensordict_consolidate,spdl_transfer,multi_tensor_copier_openmp,pinstage \
    ${BENCH_ARGS:-}
  step bench draw 60 "$PYTHON" benchmarks/comparison --from "$RESULTS/series.json" --plot "$RESULTS/scaling.png"
}

demo() {
  # shellcheck disable=SC2086
  step demo demo 180 "$PYTHON" examples/demo ${DEMO_ARGS:-}
}

doctor() { step doctor doctor 120 "$PYTHON" -m pinstage doctor --plot "$RESULTS/doctor.png"; }

promises() { step promises record_traces 400 "$PYTHON" scripts/record_traces.py --device "$DEVICE" --out "$RESULTS/loops"; }

cases() {
  step cases weather_batch 120 "$PYTHON" examples/weather_batch.py --device "$DEVICE" \
    --out "$RESULTS/weather_batch.json" --traces "$RESULTS/traces"
  step cases frame_bandwidth 180 "$PYTHON" examples/frame_bandwidth.py --device "$DEVICE" \
    --out "$RESULTS/frame_bandwidth.json"
}

[ $# -gt 0 ] || set -- tests sanitize bench demo
for name; do
  case $name in
    tests | distributed | sanitize | demo | cases | doctor | promises) rm -f "$OUT/$name.log" ;;
    bench) rm -f "$OUT/bench.log" ;;
    series | frameworks) ;; # these and single benchmarks append to the log of bench
    *)
      [[ " ${BENCHMARKS[*]} " == *" $name "* ]] || {
        echo "$0: no such step: $name; there are tests, distributed, sanitize, bench (${BENCHMARKS[*]}), demo, cases, doctor, promises, series, frameworks" >&2
        exit 2
      }
      ;;
  esac
done

say "$("$PYTHON" -c 'import sys, torch; print("python", sys.version.split()[0], "torch", torch.__version__)')"
say "$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null || echo 'no GPU')"
install || { say "installing the wheels failed"; failed=1; }
extension || { say "the extension is not in use: $(tail -n 1 "$OUT/extension.log")"; failed=1; }
for name; do "$name"; done
echo "== summary"
cat "$summary"
exit "$failed"
