#!/usr/bin/env bash
# Deletes TPUs with their requests, only those that carry your label.
#
#   tpu_scripts/delete.sh NAME [NAME ...]
#   tpu_scripts/delete.sh --dead      all of yours that are suspended or failed
#
# Settings: see common.sh.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

[[ $# -ge 1 ]] || usage
if [[ $1 == --dead ]]; then
  [[ $# -eq 1 ]] || usage
  dead=$(my_dead_requests)
  [[ -n $dead ]] || say "none of your requests is suspended or failed"
  for name in $dead; do
    say "deleting $name"
    delete_request "$name"
  done
  exit 0
fi
# All names are checked before anything goes.
for name in "$@"; do
  check_name "$name"
  owner=$(owner_of "$name")
  [[ -n $owner ]] || die "there is no request $name in ${RODS_TPU_ZONE:-this zone}"
  [[ $owner == "$RODS_OWNER" ]] ||
    die "$name belongs to $owner, you are $RODS_OWNER; to delete it all the same set RODS_OWNER=$owner"
done
failed=()
for name in "$@"; do
  say "deleting $name"
  delete_request "$name" || failed+=("$name")
done
[[ ${#failed[@]} -eq 0 ]] || die "could not delete ${failed[*]}" 1
