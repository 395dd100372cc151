#!/usr/bin/env bash
# Build NVIDIA's multi_tensor_copier (ACCV-Lab, Apache-2.0), the C++ rival of the benchmarks, with torch's extension loader.
#
#     ACCV_LAB=<checkout of https://github.com/NVIDIA/ACCV-Lab> scripts/build_rival.sh
#     PYTHONPATH=/tmp/rival python benchmarks/comparison
#
# Two builds run in parallel, in under a minute. `accvlab` has the flags of the rival's setup.py. Its documentation says
# that staging is parallel, but its setup.py does not pass -fopenmp, without which torch's at::parallel_for is a loop on
# one thread; `accvlab_openmp` has the flag. The benchmark measures both.
#
# Needs a torch with CUDA, the headers of its toolkit, a C++ compiler and ninja, but no GPU: you can build it elsewhere and
# copy it. The packages are written to $RIVAL_SITE, nothing to the checkout. An existing package that imports is kept.
# Settings: ACCV_LAB, ACCV_LAB_COMMIT (if the source has no .git), RIVAL_SITE (/tmp/rival), PYTHON (python3).
#
# pip has the toolkit's headers too: for a torch with CUDA 13, install nvidia-cuda-crt and nvidia-cuda-cccl of the same
# version. Set CUDA_HOME to <site-packages>/nvidia/cu13, CPATH to its include and include/cccl, and LIBRARY_PATH to its
# lib, and link its libcudart.so.13 as libcudart.so.
set -euo pipefail

PYTHON=${PYTHON:-python3}
RIVAL_SITE=${RIVAL_SITE:-/tmp/rival}
source=${ACCV_LAB:?set it to a checkout of https://github.com/NVIDIA/ACCV-Lab}/packages/multi_tensor_copier/accvlab/multi_tensor_copier
[ -f "$source/csrc/multi_tensor_copier.cpp" ] || {
  echo "$0: there is no $source/csrc/multi_tensor_copier.cpp; ACCV_LAB has to be a checkout of ACCV-Lab" >&2
  exit 2
}
# It has no device code, but without this torch looks for a GPU to choose the architecture.
export TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-9.0}
commit=${ACCV_LAB_COMMIT:-$(git -C "$ACCV_LAB" rev-parse --short HEAD 2>/dev/null || echo unknown)}

imports() {
  PYTHONPATH=$RIVAL_SITE${PYTHONPATH:+:$PYTHONPATH} "$PYTHON" -c "import $1.multi_tensor_copier._ext"
}

# build NAMESPACE FLAG...
build() {
  local folder=$RIVAL_SITE/$1/multi_tensor_copier
  if imports "$1" 2>/dev/null; then
    echo "$folder is there already"
    return
  fi
  mkdir -p "$folder" "$RIVAL_SITE/.build/$1"
  cp "$source"/*.py "$folder/"
  "$PYTHON" - "$source/csrc/multi_tensor_copier.cpp" "$RIVAL_SITE/.build/$1" "$folder/_ext.so" "${@:2}" <<'PY'
import shutil, sys

from torch.utils.cpp_extension import load

source, build, target, *flags = sys.argv[1:]
built = load("_ext", [source], extra_cflags=flags, extra_ldflags=flags, build_directory=build, with_cuda=True)
shutil.copy(built.__file__, target)
PY
  imports "$1"
  # The benchmarks record this version in result files.
  local info=$RIVAL_SITE/$1.multi_tensor_copier-0.0.0.dist-info
  mkdir -p "$info"
  printf 'Metadata-Version: 2.1\nName: %s.multi_tensor_copier\nVersion: 0.0.0+%s\n' "$1" "$commit" >"$info/METADATA"
  echo "built: $folder, commit $commit"
}

build accvlab -O3 -pthread &
first=$!
build accvlab_openmp -O3 -pthread -fopenmp &
wait "$first"
wait $!
