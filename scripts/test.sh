#!/usr/bin/env bash
# bash scripts/test.sh [--all] [PYTEST ARGUMENTS]: lint, types, tests; --all runs the slow ones too.
# Without arguments for pytest, tests run two at a time, and those that measure time (alone) one by one after that.
# GPU tests skip themselves, with the reason, where there is no GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
speed="not slow"
if [ "${1:-}" = --all ]; then
    speed="slow or not slow"
    shift
fi
bash scripts/setup.sh dev
export PATH="$PWD/.venv/bin:$PATH"
ruff check .
mypy
if [ $# -gt 0 ]; then
    exec python -m pytest -m "$speed" "$@"
fi
failed=0
python -m pytest -m "($speed) and not alone" -n 2 --dist worksteal || failed=$?
python -m pytest -m "($speed) and alone" || failed=$?
exit "$failed"
