#!/usr/bin/env bash
# bash scripts/install_slurm.sh: install SLURM's daemons and commands (Debian, Ubuntu), which tests/bench/slurm starts
# for itself.  Does nothing where they are there already.
set -euo pipefail

fail() { echo "install_slurm: $1" >&2; exit 2; }

export PATH="$PATH:/usr/sbin:/sbin"
for command in munged slurmctld slurmd sbatch ip; do
    command -v "$command" >/dev/null || missing=1
done
if [ -z "${missing:-}" ]; then
    echo "install_slurm: $(slurmd -V) is there"
    exit 0
fi
command -v apt-get >/dev/null || fail "there is no apt-get here; install munge, slurmctld, slurmd and slurm's commands"
as_root=()
if [ "$(id -u)" != 0 ]; then
    sudo -n true 2>/dev/null || fail "only root may install packages; run this as root"
    as_root=(sudo -n)
fi
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    slurm-wlm slurmctld slurmd munge iproute2 >/dev/null
echo "install_slurm: $(slurmd -V) installed"
