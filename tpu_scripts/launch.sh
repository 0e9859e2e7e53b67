#!/usr/bin/env bash
# Starts a command on every worker of a TPU; it goes on when this terminal closes.
#
#   tpu_scripts/launch.sh NAME [--run RUN] [--wait] [--worker=all] -- COMMAND [ARGUMENT ...]
#   tpu_scripts/launch.sh NAME --stop --run RUN
#
# RUN names the log (~/rods_runs/RUN.log on each worker), by default after the time. --wait
# returns when the command ended on every worker, with its status. --stop ends that run by
# the process number it wrote down. Flags for the TPU compiler may be in XLA_FLAGS here; they
# reach LIBTPU_INIT_ARGS there. Settings: see common.sh.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

[[ $# -ge 1 && $1 != -* ]] || usage
name=$1
shift
check_name "$name"
check_number RODS_COORDINATOR_PORT
check_number RODS_START_TIMEOUT
check_number RODS_POLL_S
run=$(date +%Y%m%d-%H%M%S)
wait=0 stop=0 worker=all
while [[ $# -gt 0 ]]; do
  case $1 in
    --run) [[ $# -ge 2 ]] || usage; run=$2; shift 2 ;;
    --wait) wait=1; shift ;;
    --stop) stop=1; shift ;;
    --worker=*) worker=${1#--worker=}; shift ;;
    --) shift; break ;;
    *) usage ;;
  esac
done
[[ $run =~ ^[A-Za-z0-9._-]+$ ]] || die "'$run' is not a run name: letters, digits and . _ -"
script='rods_jax/tpu_scripts/worker.sh'
if [[ $stop == 1 ]]; then
  on_workers "$name" all "bash $script stop $run"
  exit
fi
[[ $# -ge 1 ]] || usage

mapfile -t addresses < <(addresses_of "$name")
count=${#addresses[@]}
[[ $count -ge 1 ]] || die "$name has no workers yet; see tpu_scripts/status.sh $name" 1
# A part of a pod would wait for the rest for ever.
if [[ $worker != all && $count -gt 1 ]]; then
  die "$name is a pod of $count workers and starts with --worker=all only, not --worker=$worker"
fi
[[ $worker == all || $worker == 0 ]] || die "$name has one worker, number 0, not $worker"

xla=() libtpu=()
for flag in ${XLA_FLAGS:-}; do
  if [[ $flag == --xla_tpu_* ]]; then libtpu+=("$flag"); else xla+=("$flag"); fi
done
for flag in ${LIBTPU_INIT_ARGS:-}; do libtpu+=("$flag"); done
settings=("RODS_PROCESSES=$count" "RODS_START_TIMEOUT=$RODS_START_TIMEOUT")
[[ $count -eq 1 ]] || settings+=("JAX_COORDINATOR_ADDRESS=${addresses[0]}:$RODS_COORDINATOR_PORT")
[[ ${#xla[@]} -eq 0 ]] || settings+=("XLA_FLAGS=${xla[*]}")
[[ ${#libtpu[@]} -eq 0 ]] || settings+=("LIBTPU_INIT_ARGS=${libtpu[*]}")

# No worker starts unless the TPU is free on all of them.
on_workers "$name" "$worker" "bash $script check" || die "the TPU is not free on every worker, see above" 3
on_workers "$name" "$worker" "$(quoted env "${settings[@]}" bash "$script" start "$run" -- "$@")"
say "started $run on $count worker(s) of $name; look: tpu_scripts/status.sh $name"
[[ $wait == 1 ]] || exit 0

while true; do
  sleep "$RODS_POLL_S"
  if ! states=$(on_workers "$name" "$worker" "bash $script state $run" 2>/dev/null); then
    # A lost connection passes; a TPU that was taken back does not return.
    now=$(state_of "$name") || continue
    [[ $now == ACTIVE ]] || die "$name is ${now:-gone}, $run with it; resume it on a new TPU" 1
    continue
  fi
  grep -q ' running' <<<"$states" && continue
  printf '%s\n' "$states"
  [[ $(grep -c ' ended 0$' <<<"$states") -eq $count ]] || die "$run did not end well on every worker" 1
  exit 0
done
