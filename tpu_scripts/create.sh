#!/usr/bin/env bash
# Asks for a TPU and waits until it runs.
#
#   tpu_scripts/create.sh NAME
#
# When interrupted, or when the request fails, it deletes the request again. Where the quota
# is used up it deletes your own suspended and failed requests, which still count, and tries
# once more. Settings: see common.sh.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

[[ $# -eq 1 && $1 != -* ]] || usage
name=$1
check_name "$name"
check_number RODS_POLL_S

answer=$(mktemp)
asked=0 # whether a request may be there that only this script knows of

finish() {
  local code=$?
  trap - EXIT
  rm -f "$answer"
  if [[ $asked == 1 && -n $(owner_of "$name") ]]; then
    say "deleting the request $name"
    delete_request "$name" || say "could not delete $name: run tpu_scripts/delete.sh $name"
  fi
  exit "$code"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

ask() {
  local spot=()
  [[ $RODS_TPU_SPOT == 1 ]] && spot=(--spot)
  tpu queued-resources create "$name" --node-id="$name" \
    --accelerator-type="$RODS_TPU_TYPE" --runtime-version="$RODS_TPU_IMAGE" \
    --labels="rods_owner=$RODS_OWNER" ${spot[@]+"${spot[@]}"} >"$answer" 2>&1
}

owner=$(owner_of "$name")
[[ -z $owner ]] || die "there is a request $name already; see tpu_scripts/status.sh $name"

asked=1 # from here on, since a call that was cut off may have been heard
if ! ask; then
  cat "$answer" >&2
  grep -qiE 'quota|RESOURCE_EXHAUSTED|limit' "$answer" || die "the request was refused" 1
  dead=$(my_dead_requests)
  [[ -n $dead ]] || die "the quota is used up and none of your requests is suspended or failed" 1
  for old in $dead; do
    say "deleting $old, which is suspended or failed and still counts"
    delete_request "$old"
  done
  if ! ask; then
    cat "$answer" >&2
    die "refused again after deleting: $(echo "$dead" | tr '\n' ' ')" 1
  fi
fi

last=
while true; do
  state=$(state_of "$name")
  [[ $state == "$last" ]] || say "$name: $state"
  last=$state
  case $state in
    ACTIVE) break ;;
    FAILED | SUSPENDED | SUSPENDING)
      tpu queued-resources describe "$name" >&2 || true
      die "$name did not come up" 1
      ;;
  esac
  # `wait` returns at once on a signal, `sleep` would sit it out.
  sleep "$RODS_POLL_S" >/dev/null 2>&1 &
  wait $!
done
asked=0
say "$name runs; next: tpu_scripts/setup.sh $name"
