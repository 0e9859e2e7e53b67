#!/usr/bin/env bash
# Copies this working tree to every worker of a TPU and installs what it needs there.
#
#   tpu_scripts/setup.sh NAME
#
# Takes the files that git tracks, as they are now, plus untracked ones that it does not
# ignore. Run it again after a change. Settings: see common.sh.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

[[ $# -eq 1 && $1 != -* ]] || usage
name=$1
check_name "$name"
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

bundle=$(mktemp -d)
trap 'rm -rf "$bundle"' EXIT
(
  cd "$root" || exit
  # A file that was deleted but is still tracked must not stop tar.
  git ls-files -z --cached --others --exclude-standard |
    while IFS= read -r -d '' file; do
      if [[ -e $file ]]; then printf '%s\0' "$file"; fi
    done | tar --null --files-from=- -czf "$bundle/rods_jax.tgz"
)
say "copying to every worker of $name"
tpu tpu-vm scp "$bundle/rods_jax.tgz" "$name:rods_jax.tgz" --worker=all

# TPU images may come with an older Python than 3.11.
# shellcheck disable=SC2016  # expanded on the worker
install='set -e
mkdir -p rods_jax rods_runs
tar -xzf rods_jax.tgz -C rods_jax
python=
for p in python3.13 python3.12 python3.11; do command -v $p >/dev/null && python=$p && break; done
if [ -z "$python" ]; then
  sudo apt-get -o DPkg::Lock::Timeout=300 update -qq
  sudo apt-get -o DPkg::Lock::Timeout=300 install -y -qq python3.11 python3.11-venv
  python=python3.11
fi
[ -x rods_venv/bin/python ] || $python -m venv rods_venv
rods_venv/bin/python -m pip install -q --upgrade pip
cd rods_jax
../rods_venv/bin/python -m pip install -q --upgrade -r requirements.txt "jax[tpu]"
../rods_venv/bin/python -c "import jax, rods_jax, sys; print(\"ready: Python\", sys.version.split()[0], \"jax\", jax.__version__)"'
on_workers "$name" all "$install"
say "next: tpu_scripts/launch.sh $name -- python -m experiments.train --config configs/..."
