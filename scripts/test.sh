#!/usr/bin/env bash
# bash scripts/test.sh [--all] [PYTEST ARGUMENTS]: lint, types, tests; --all runs the slow ones too.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh dev
export PATH="$PWD/.venv/bin:$PATH"
marks="not slow"
if [ "${1:-}" = --all ]; then
    marks="slow or not slow"
    shift
fi
# GPU tests skip themselves, with the reason, where there is no GPU.
ruff check .
mypy
exec python -m pytest -m "$marks" "$@"
