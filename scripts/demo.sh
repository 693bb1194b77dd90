#!/usr/bin/env bash
# bash scripts/demo.sh: install, run every library at one and two stages on CPU, print one table.
# Results go to results/demo; what is there already is not run again (DEMO_RESULTS names another folder).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
exec .venv/bin/python -m bench -m experiment=demo device=cpu results_dir="${DEMO_RESULTS:-results/demo}"
