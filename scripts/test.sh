#!/usr/bin/env bash
# bash scripts/test.sh [--all] [PYTEST ARGUMENTS]: lint, types, tests; --all runs the slow ones too.
# GPU tests skip themselves, with the reason, where there is no GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
marks=(-m "not slow")
if [ "${1:-}" = --all ]; then
    marks=()
    shift
fi
bash scripts/setup.sh dev
export PATH="$PWD/.venv/bin:$PATH"
ruff check .
mypy
exec python -m pytest "${marks[@]}" "$@"
