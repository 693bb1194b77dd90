#!/usr/bin/env bash
# bash scripts/setup.sh [dev]: make .venv with every library; with "dev" also what tests need.
# Does nothing where nothing has changed since the last time.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
extras=all
[ "${1:-}" = dev ] && extras=all,dev

python=${PYTHON:-}
for candidate in python3.11 python3 python3.12 python3.13; do
    [ -n "$python" ] && break
    if command -v "$candidate" >/dev/null &&
        "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then python=$candidate; fi
done
[ -n "$python" ] || { echo "setup: needs Python 3.11 or later; install it or set PYTHON" >&2; exit 2; }

# DeepSpeed compiles an extension on CPU, which takes a C++ compiler.
if ! command -v g++ >/dev/null; then
    echo "setup: installing g++"
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends g++ >/dev/null
    else
        echo "setup: needs g++ (DeepSpeed compiles an extension); install it, then run this again" >&2
        exit 2
    fi
fi

stamp=.venv/.setup-$extras
now=$(cat pyproject.toml scripts/constraints.txt | sha256sum | cut -d' ' -f1)
if [ "$(cat "$stamp" 2>/dev/null)" != "$now" ]; then
    echo "setup: installing into .venv (some minutes the first time)"
    [ -x .venv/bin/python ] || "$python" -m venv .venv
    # torchgpipe and fairscale are built from source and want setuptools in their own build only.
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c scripts/constraints.txt -e ".[$extras]"
    echo "$now" >"$stamp"
    [ "$extras" = all,dev ] && echo "$now" >.venv/.setup-all
fi

export TORCH_EXTENSIONS_DIR="$PWD/.cache/torch_extensions" PATH="$PWD/.venv/bin:$PATH"
if [ -z "$(find "$TORCH_EXTENSIONS_DIR" -name 'deepspeed_shm_comm.so' 2>/dev/null)" ]; then
    echo "setup: compiling DeepSpeed's CPU extension (about 40 s, once)"
    mkdir -p .cache
    python -m adapters.deepspeed >.cache/deepspeed-extension.log 2>&1 ||
        { echo "setup: that failed; see .cache/deepspeed-extension.log" >&2; exit 1; }
fi
echo "setup: ready; source .venv/bin/activate"
