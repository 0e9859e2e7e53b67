# Shared by the scripts in this folder; source it. Settings are environment variables.
#
#   RODS_TPU_ZONE           zone of the TPU, required
#   RODS_TPU_PROJECT        project; gcloud's own default if unset
#   RODS_TPU_TYPE           accelerator type (v5litepod-8)
#   RODS_TPU_IMAGE          runtime version (v2-alpha-tpuv5-lite)
#   RODS_TPU_SPOT           1 for spot capacity (0)
#   RODS_OWNER              label on what create.sh asks for (the local user name)
#   RODS_COORDINATOR_PORT   port of worker 0 that the firewall lets the others reach (8476)
#   RODS_START_TIMEOUT      seconds a worker waits for the others (900)
#   RODS_POLL_S             seconds between two looks at a state (20)
# shellcheck shell=bash
set -euo pipefail

RODS_TPU_TYPE=${RODS_TPU_TYPE:-v5litepod-8}
RODS_TPU_IMAGE=${RODS_TPU_IMAGE:-v2-alpha-tpuv5-lite}
RODS_TPU_SPOT=${RODS_TPU_SPOT:-0}
RODS_COORDINATOR_PORT=${RODS_COORDINATOR_PORT:-8476}
RODS_START_TIMEOUT=${RODS_START_TIMEOUT:-900}
RODS_POLL_S=${RODS_POLL_S:-20}
# Labels take lower-case letters, digits, - and _.
RODS_OWNER=$(printf '%s' "${RODS_OWNER:-$(id -un)}" | tr '[:upper:]' '[:lower:]' | tr -c 'a-z0-9_-' '-')

die() { # message, exit code
  printf 'error: %s\n' "$1" >&2
  exit "${2:-2}"
}

say() { printf '%s\n' "$*" >&2; }

usage() { # the comment at the top of the calling script
  sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" >&2
  exit 2
}

check_name() {
  [[ $1 =~ ^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$ ]] ||
    die "'$1' is not a TPU name: lower-case letters, digits and -, beginning with a letter"
}

check_number() { # variable name
  [[ ${!1} =~ ^[0-9]+$ ]] || die "$1='${!1}' is not a whole number"
}

tpu() { # gcloud compute tpus ARGUMENTS, in the right zone and project
  command -v gcloud >/dev/null || die "gcloud is not installed"
  [[ -n ${RODS_TPU_ZONE:-} ]] || die "RODS_TPU_ZONE is not set; for instance: export RODS_TPU_ZONE=us-west4-a"
  gcloud compute tpus "$@" --zone="$RODS_TPU_ZONE" ${RODS_TPU_PROJECT:+"--project=$RODS_TPU_PROJECT"}
}

# name,state,owner of every queued resource, one a line. The owner is compared here and not
# in a filter, so that nothing of others is ever listed as ours.
list_requests() {
  tpu queued-resources list \
    --format='csv[no-heading](name.basename(),state.state,tpu.nodeSpec[0].node.labels.rods_owner)'
}

owner_of() { # name; empty if there is no such request
  list_requests | awk -F, -v name="$1" '$1 == name { print ($3 == "" ? "nobody" : $3) }'
}

my_dead_requests() { # they hold quota although nothing runs
  list_requests | awk -F, -v me="$RODS_OWNER" \
    '$3 == me && ($2 == "SUSPENDED" || $2 == "FAILED") { print $1 }'
}

state_of() { tpu queued-resources describe "$1" --format='value(state.state)'; }

delete_request() { # the request and its machines
  tpu queued-resources delete "$1" --force --quiet
}

addresses_of() { # internal addresses of the workers in order, one a line
  tpu tpu-vm describe "$1" --format='value(networkEndpoints[].ipAddress)' | tr -s ';, ' '\n'
}

on_workers() { # name, workers (all or a number), command text
  tpu tpu-vm ssh "$1" --worker="$2" --command="$3"
}

quoted() { # the words as one line of shell
  local words
  printf -v words '%q ' "$@"
  printf '%s' "${words% }"
}
