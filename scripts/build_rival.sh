#!/usr/bin/env bash
# Build NVIDIA's multi_tensor_copier (ACCV-Lab, Apache-2.0), the C++ rival of the benchmarks, by torch's extension loader.
#
#     ACCV_LAB=<checkout of https://github.com/NVIDIA/ACCV-Lab> scripts/build_rival.sh
#     PYTHONPATH=/tmp/rival python benchmarks/comparison
#
# It is built twice at a time, in under a minute. `accvlab` has the flags of its own setup.py. Its documentation says that
# staging is parallel, but that setup.py does not pass -fopenmp, without which at::parallel_for of torch's headers is a
# loop on one thread; `accvlab_openmp` has the flag. The benchmark measures both.
#
# Needs a torch with CUDA, the headers of its toolkit, a C++ compiler and ninja; no GPU, so that it can be built elsewhere
# and carried. Nothing is written into the checkout or into this repository: the packages go to $RIVAL_SITE, and one that
# is there and imports is left as it is. Settings: ACCV_LAB, ACCV_LAB_COMMIT (where the source has no .git), RIVAL_SITE
# (/tmp/rival), PYTHON (python3).
#
# Where the toolkit or some of its headers are missing, pip has them: beside a torch of CUDA 13 install nvidia-cuda-crt
# and nvidia-cuda-cccl of the same version, let CUDA_HOME be <site-packages>/nvidia/cu13, CPATH its include and
# include/cccl, LIBRARY_PATH its lib, and name its libcudart.so.13 libcudart.so as well.
set -euo pipefail

PYTHON=${PYTHON:-python3}
RIVAL_SITE=${RIVAL_SITE:-/tmp/rival}
source=${ACCV_LAB:?set it to a checkout of https://github.com/NVIDIA/ACCV-Lab}/packages/multi_tensor_copier/accvlab/multi_tensor_copier
[ -f "$source/csrc/multi_tensor_copier.cpp" ] || {
  echo "$0: there is no $source/csrc/multi_tensor_copier.cpp; ACCV_LAB has to be a checkout of ACCV-Lab" >&2
  exit 2
}
# There is no device code in it; without this, torch looks for a GPU to know the architecture.
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
  # So that result files know what they measured.
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
