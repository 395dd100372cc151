#!/usr/bin/env bash
# Collect in .whl the wheels that the GPU tests and benchmarks need on a machine without a package index: the packages of the
# group `test` in .venv, for that machine's Python, except those that it has. Run `make test` first, which fills .venv.
#
#     scripts/wheels.sh [PYTHON_VERSION]        # default: 3.12
#     VENV=.venv-frameworks WANTED="lightning accelerate torch-geometric" scripts/wheels.sh    # for benchmarks/frameworks.py
#     VENV=.venv-rivals WANTED="fastsafetensors runai-model-streamer @torchtune" scripts/wheels.sh    # for weights.py, offload.py
#     VENV=.venv-diffusers WANTED="diffusers accelerate" scripts/wheels.sh    # for frozen.py
#
# .venv-rivals isn't made by make: create it, and let its pip (25.1 or later) install these and packaging, with
# `-c constraints.txt fastsafetensors runai-model-streamer packaging --group torchtune`. So is .venv-diffusers, with
# `-c constraints.txt diffusers accelerate packaging "huggingface-hub<2"`.
# WANTED: packages, or @GROUP for a dependency group, with their dependencies. VENV: the environment that has them.
# HAVE: packages that the machine has, with their dependencies; these are left out.
set -euo pipefail
cd "$(dirname "$0")/.."

version=${1:-3.12}
HAVE=${HAVE:-torch numpy cuda-python pytest pytest-timeout hypothesis rich matplotlib psutil}
WANTED=${WANTED:-@test}
python=${VENV:-.venv}/bin/python
platforms=(--platform manylinux2014_x86_64)
for glibc in $(seq 17 39); do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done

wanted=$("$python" - "$HAVE" "$WANTED" <<'PY'
import re, sys, tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.dependency_groups import resolve_dependency_groups
from packaging.requirements import Requirement  # in .venv for the tests


def closure(names: list[str]) -> dict[str, str]:
    """Name and version of packages and of all that they need, of what is installed."""
    found: dict[str, str] = {}
    todo = [Requirement(name) for name in names]
    seen = set()
    while todo:
        requirement = todo.pop()
        key = (re.sub(r"[-_.]+", "-", requirement.name).lower(), frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        try:
            package = distribution(requirement.name)
        except PackageNotFoundError:
            continue
        found[key[0]] = package.version
        for line in package.requires or []:
            need = Requirement(line)
            if need.marker is None or any(need.marker.evaluate({"extra": e}) for e in ("", *requirement.extras)):
                todo.append(need)
    return found


groups = tomllib.loads(Path("pyproject.toml").read_text())["dependency-groups"]
wanted = []
for name in sys.argv[2].split():
    wanted += map(str, resolve_dependency_groups(groups, name[1:])) if name[0] == "@" else [name]
have = closure(sys.argv[1].split())
for name, package_version in sorted(closure(wanted).items()):
    if name not in have:
        print(f"{name}=={package_version}")
PY
)
echo "$wanted"
rm -rf .whl
mkdir .whl
for package in $wanted; do
  "$python" -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --python-version "$version" \
    --implementation cp "${platforms[@]}" -d .whl "$package" 2>/dev/null ||
    "$python" -m pip wheel -q --disable-pip-version-check --no-deps -w .whl "$package" # a pure package without a wheel
done
du -sh .whl
