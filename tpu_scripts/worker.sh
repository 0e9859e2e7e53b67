#!/usr/bin/env bash
# Runs on a TPU worker; launch.sh and status.sh call it.
#
#   worker.sh check                       is the TPU free? removes a stale lock
#   worker.sh start RUN -- COMMAND ...    in the background, logged
#   worker.sh state RUN                   one line: running, ended STATUS, or lost
#   worker.sh states                      the same for every run, with the last log line
#   worker.sh stop RUN                    ends the processes of that run
set -euo pipefail

home=${RODS_HOME:-$HOME}
runs=$home/rods_runs
lock=${RODS_LOCK:-/tmp/libtpu_lockfile}
read -ra devices <<<"${RODS_DEVICES:-/dev/accel* /dev/vfio/*}"
mkdir -p "$runs"

number() { # of this worker in its pod
  if [[ ${RODS_PROCESSES:-1} == 1 ]]; then
    echo 0
    return
  fi
  curl -sSf -H 'Metadata-Flavor: Google' \
    http://metadata.google.internal/computeMetadata/v1/instance/attributes/agent-worker-number
}

holders() { # process numbers that have a TPU device open, one a line
  local device tests=()
  for device in "${devices[@]}"; do tests+=(-o -lname "$device"); done
  # Processes come and go under find; what is gone holds nothing.
  { find /proc/[0-9]*/fd \( "${tests[@]:1}" \) 2>/dev/null || true; } | cut -d/ -f3 | sort -un
}

check() {
  local pid owner
  for pid in $(holders); do
    printf '%s: the TPU is held by process %s (%s, user %s); wait for it, or stop that run\n' \
      "$(hostname)" "$pid" "$(tr '\0' ' ' <"/proc/$pid/cmdline" | cut -c1-80)" \
      "$(stat -c %U "/proc/$pid")" >&2
    return 3
  done
  [[ -e $lock ]] || return 0
  owner=$(stat -c %U "$lock")
  if [[ $owner != "$(id -un)" ]]; then
    printf '%s: %s belongs to user %s, whose processes cannot be seen from here; if none uses the TPU, run: sudo -u %s rm %s\n' \
      "$(hostname)" "$lock" "$owner" "$owner" "$lock" >&2
    return 3
  fi
  # A killed process cannot remove its lock, and every later start would fail on it.
  rm -f "$lock"
  printf '%s: removed the stale lock %s\n' "$(hostname)" "$lock" >&2
}

start() { # run -- command ...
  local run=$1
  shift 2
  [[ ! -e $runs/$run.pid ]] || {
    printf '%s: there is a run %s already, choose another --run\n' "$(hostname)" "$run" >&2
    return 2
  }
  RODS_PROCESS_ID=$(number)
  export RODS_PROCESS_ID
  rm -f "$runs/$run.status"
  # A session of its own: it outlives the connection, and `stop` ends all of it at once.
  setsid bash "${BASH_SOURCE[0]}" run "$run" -- "$@" </dev/null >"$runs/$run.log" 2>&1 &
  echo $! >"$runs/$run.pid"
  echo "$(hostname): started $run"
}

run() { # run -- command ...
  local run=$1 status=0
  shift 2
  cd "$home/rods_jax"
  PATH=$home/rods_venv/bin:$PATH "$@" || status=$?
  echo "$status" >"$runs/$run.status"
}

state() {
  local run=$1 pid
  [[ -e $runs/$run.pid ]] || {
    echo "$(hostname) $run never started"
    return
  }
  pid=$(<"$runs/$run.pid")
  if [[ -e $runs/$run.status ]]; then
    echo "$(hostname) $run ended $(<"$runs/$run.status")"
  elif ours "$pid" "$run"; then
    echo "$(hostname) $run running"
  else
    echo "$(hostname) $run lost" # killed, or the machine restarted
  fi
}

ours() { # the number may belong to another process by now
  tr '\0' ' ' 2>/dev/null <"/proc/$1/cmdline" | grep -qF "worker.sh run $2 " || return 1
}

states() {
  local file run
  for file in "$runs"/*.pid; do
    [[ -e $file ]] || { echo "$(hostname) no runs"; return; }
    run=$(basename "$file" .pid)
    echo "$(state "$run"): $(tail -n 1 "$runs/$run.log" 2>/dev/null | tr '\r' '\n' | tail -n 1 | cut -c1-160)"
  done
}

stop() {
  local run=$1 pid
  [[ $(state "$run") == *" running" ]] || { state "$run"; return; }
  pid=$(<"$runs/$run.pid")
  kill -TERM -- "-$pid" 2>/dev/null || true
  for _ in $(seq 100); do
    kill -0 -- "-$pid" 2>/dev/null || break
    sleep 0.2
  done
  kill -KILL -- "-$pid" 2>/dev/null || true
  state "$run"
}

"$@"
