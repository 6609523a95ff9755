#!/usr/bin/env bash
# Fails when a tracked C++ file is not formatted as .clang-format says. Only clang-format 14 counts,
# as each major version formats a little differently; without it the check is skipped (exit 77).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

formatter=""
for candidate in clang-format-14 clang-format; do
  if command -v "$candidate" >/dev/null && "$candidate" --version | grep -q 'version 14\.'; then
    formatter="$candidate"
    break
  fi
done
if [[ -z "$formatter" ]]; then
  echo "skipped: no clang-format 14 here (Debian and Ubuntu: apt-get install clang-format-14)"
  exit 77
fi
if ! git rev-parse --is-inside-work-tree >/dev/null 2>&1; then
  echo "skipped: not a git checkout"
  exit 77
fi
git ls-files -z -- '*.h' '*.cc' '*.cu' '*.cuh' | xargs -0 "$formatter" --dry-run -Werror
echo "format: clean"
