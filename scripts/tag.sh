#!/usr/bin/env bash
# Tag a release; publish nothing.
#
#     scripts/tag.sh                  # dates and commits the changelog if needed, then tags the commit
#     scripts/tag.sh --check v0.3.0   # only checks that all files have this version; for the workflow
#
# The version is read from src/pinstage/__init__.py. The tag's message is the version's section of CHANGELOG.md.
# docs/releases.md says what happens after `git push`.
set -euo pipefail
cd "$(dirname "$0")/.."

die() { echo "$0: $*" >&2; exit 1; }

version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' src/pinstage/__init__.py)
tag=v$version
undated="## [$version], not released yet"

check() {
  grep -qx "version: $version" CITATION.cff || die "CITATION.cff names another version than src/pinstage/__init__.py: write version: $version"
  grep -qE "^## \[$version\] - [0-9]{4}-[0-9]{2}-[0-9]{2}$" CHANGELOG.md ||
    die "CHANGELOG.md has no heading ## [$version] - YYYY-MM-DD"
}

if [ "${1:-}" = --check ]; then
  [ "${2:-}" = "$tag" ] || die "the tag is ${2:-missing}, but src/pinstage/__init__.py has version $version: tag $tag"
  check
  exit
fi
[ $# -eq 0 ] || die "unknown argument $1; there is --check TAG"
[ -z "$(git status --porcelain)" ] || die "the working tree has changes: commit or remove them"
[ "$(git branch --show-current)" = main ] || die "releases are tagged on main: git switch main"
! git rev-parse -q --verify "refs/tags/$tag" >/dev/null || die "$tag exists already: raise __version__"
if grep -qxF "$undated" CHANGELOG.md; then
  sed -i "s/^## \[$version\], not released yet$/## [$version] - $(date -u +%F)/" CHANGELOG.md
  check
  git commit -qam "Release $version"
fi
check
awk -v head="## [$version]" 'index($0, head) == 1 { on = 1; next } /^## / { on = 0 } on' CHANGELOG.md |
  git tag -a "$tag" --cleanup=verbatim -F <(printf 'pinstage %s\n' "$version"; cat)
echo "tagged: $tag. To publish it: git push --follow-tags, then approve the job \"publish\""
