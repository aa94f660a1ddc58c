#!/usr/bin/env bash
# Counts `unsafe` in each file, and fails when docs/security.md does not give the reason for a file.
# That each use has its SAFETY line is clippy's business (undocumented_unsafe_blocks).
set -euo pipefail
cd "$(dirname "$0")/.."
bad=0
total=0
while IFS=: read -r file count; do
  [ "$count" -gt 0 ] || continue
  total=$((total + count))
  printf '%4d  %s\n' "$count" "$file"
  grep -qF "\`$file\`" docs/security.md || { echo "docs/security.md does not say why $file needs unsafe"; bad=1; }
done < <(git ls-files 'src/*.rs' 'python/*.rs' | xargs grep -cE '\bunsafe (\{|fn|impl)' || true)
printf '%4d  in all\n' "$total"
exit "$bad"
