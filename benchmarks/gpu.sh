#!/usr/bin/env bash
# All that only a GPU can show, as Markdown tables:
#   benchmarks/gpu.sh [--pretend] [--only=METHOD,...] [tests] [throughput] [memory] [training] [profiles]
# Parts that are not named all run. Each ends after 260 seconds (VLIGHTNING_PART_SECONDS), all after 22 minutes, and writes
# $OUT/gpu/PART.md (OUT: runs) row by row; its first line names missing packages, and what there was no time for has a row
# that says so.
# --pretend runs them on the CPU at toy sizes, which tries everything but the device. Runs from the source tree and
# installs and downloads nothing; VLIGHTNING_IMAGES names a folder of images, otherwise shapes are drawn.
set -u
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
out=${OUT:-$root/runs}/gpu
seconds=${VLIGHTNING_PART_SECONDS:-260}
options=() parts=()
for word in "$@"; do
  case $word in --*) options+=("$word") ;; *) parts+=("$word") ;; esac
done
[ ${#parts[@]} -gt 0 ] || parts=(tests throughput memory training profiles)
link=$(mktemp -d)
trap 'rm -rf "$link"' EXIT
ln -s "$root" "$link/vlightning" # the folders at the root are the package
# What an installed package says of itself; the package reads its version there.
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$root/pyproject.toml")
mkdir "$link/vlightning-$version.dist-info"
printf 'Metadata-Version: 2.1\nName: vlightning\nVersion: %s\n' "$version" >"$link/vlightning-$version.dist-info/METADATA"
export PYTHONPATH="$link:$root/tests:$root/benchmarks${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
mkdir -p "$out"
failed=0
for part in "${parts[@]}"; do
  echo "== $part"
  timeout "$seconds" "$python" "$root/benchmarks/gpu/$part.py" ${options[@]+"${options[@]}"} --out "$out/$part.md" 2>"$out/$part.log"
  status=$?
  if [ $status -ne 0 ]; then
    failed=1
    echo "$part ended with status $status (124: after $seconds seconds); the last lines of $out/$part.log:"
    tail -n 15 "$out/$part.log"
  fi
done
exit $failed
