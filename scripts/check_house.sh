#!/usr/bin/env bash
# Rules of the house that no other tool checks: room sizes, fixture sizes.
set -euo pipefail
cd "$(dirname "$0")/.."
bad=0
while IFS= read -r line; do
  echo "more than 600 lines: $line"; bad=1
done < <(git ls-files 'src/*.rs' 'kernels/*.cu' 'python/*.py' 'python/*.rs' | xargs wc -l | awk '$2 != "total" && $1 > 600 { print $2 " (" $1 ")" }')
fixtures=$(git ls-files -z tests/fixtures | xargs -0 du -ck | tail -n 1 | cut -f 1)
if [ "$fixtures" -gt 20480 ]; then echo "tests/fixtures holds $fixtures KiB, at most 20480"; bad=1; fi
exit "$bad"
