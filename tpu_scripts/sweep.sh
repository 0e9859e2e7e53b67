#!/usr/bin/env bash
# Trains once for each line of a file on one TPU, one after the other.
#
#   tpu_scripts/sweep.sh NAME CONFIG FILE
#
# Each line of FILE holds overrides as `experiments.train --set` takes them, separated by
# blanks, without quotes; # begins a comment. Runs are called after FILE and the line number,
# and a run that fails does not stop the next. Settings: see common.sh.
#
#   grpo.learning_rate=1e-6 seed=1
#   grpo.learning_rate=3e-6 seed=1
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

[[ $# -eq 3 && $1 != -* ]] || usage
name=$1 config=$2 file=$3
check_name "$name"
[[ -r $file ]] || die "$file: no such file"
[[ -r $config ]] || die "$config: no such file"
here=$(dirname "${BASH_SOURCE[0]}")
stem=$(basename "$file")
stem=${stem%.*}
line=0 count=0 failed=()
mapfile -t lines <"$file" # now, since ssh below would read from the file
for text in "${lines[@]}"; do
  line=$((line + 1))
  read -ra overrides <<<"${text%%#*}"
  [[ ${#overrides[@]} -gt 0 ]] || continue
  run=$stem-$line
  sets=()
  for override in "${overrides[@]}"; do
    [[ $override == *=* ]] || die "$file line $line: '$override' is not field=value"
    sets+=(--set "$override")
  done
  say "$run: ${overrides[*]}"
  "$here/launch.sh" "$name" --run "$run" --wait -- \
    python -m experiments.train --config "$config" --out "runs/$run" "${sets[@]}" || failed+=("$run")
  count=$((count + 1))
done
say "$count runs, ${#failed[@]} failed"
[[ ${#failed[@]} -eq 0 ]] || die "failed: ${failed[*]}" 1
