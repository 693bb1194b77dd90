#!/usr/bin/env bash
# bash scripts/demo.sh: install, run every library at one and two stages on CPU, print one table, write the report.
# Results go to results/demo; what is there already is not run again (DEMO_RESULTS names another folder).
# The exit code is the sweep's: 1 where a cell failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
results=${DEMO_RESULTS:-results/demo}
bash scripts/setup.sh
failed=0
.venv/bin/python -m bench -m experiment=demo device=cpu results_dir="$results" || failed=$?
[ "$failed" -le 1 ] || exit "$failed"
.venv/bin/python -m bench.report "$results" || exit
exit "$failed"
