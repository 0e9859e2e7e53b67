#!/usr/bin/env bash
# Your requests; or what each worker of one TPU is doing, workers without an answer by number.
#
#   tpu_scripts/status.sh
#   tpu_scripts/status.sh NAME
#
# Settings: see common.sh.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

if [[ $# -eq 0 ]]; then
  mine=$(list_requests | awk -F, -v me="$RODS_OWNER" '$3 == me { printf "%-32s %s\n", $1, $2 }')
  echo "${mine:-$RODS_OWNER has no request in $RODS_TPU_ZONE}"
  exit 0
fi
[[ $# -eq 1 && $1 != -* ]] || usage
name=$1
check_name "$name"
[[ -n $(owner_of "$name") ]] || die "there is no request $name in ${RODS_TPU_ZONE:-this zone}"
state=$(state_of "$name")
echo "$name: $state"
[[ $state == ACTIVE ]] || exit 0
mapfile -t addresses < <(addresses_of "$name")
silent=()
# One by one, so that a dead worker is named and does not hide the others.
for ((i = 0; i < ${#addresses[@]}; i++)); do
  if answer=$(on_workers "$name" "$i" 'bash rods_jax/tpu_scripts/worker.sh states' 2>/dev/null); then
    while IFS= read -r text; do echo "worker $i: $text"; done <<<"$answer"
  else
    silent+=("$i")
  fi
done
[[ ${#silent[@]} -eq 0 ]] || die "no answer from worker ${silent[*]}" 1
