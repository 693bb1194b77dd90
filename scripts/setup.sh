#!/usr/bin/env bash
# bash scripts/setup.sh [dev]: make .venv with every library; with "dev" also what tests need.
# Does nothing where nothing has changed since the last time.  PYTHON names another interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extras=all
case "${1:-}" in
    "") ;;
    dev) extras=all,dev ;;
    *) echo "setup: $1: there is no such word; it takes dev or nothing" >&2; exit 2 ;;
esac

fail() { echo "setup: $1" >&2; exit 2; }

# DeepSpeed compiles an extension on CPU, which takes a C++ compiler.
if ! command -v g++ >/dev/null; then
    as_root=()
    [ "$(id -u)" = 0 ] || as_root=(sudo -n)
    if command -v apt-get >/dev/null && "${as_root[@]}" true 2>/dev/null; then
        echo "setup: installing g++"
        "${as_root[@]}" apt-get update -qq
        "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends g++ >/dev/null
    else
        fail "there is no g++, which DeepSpeed needs to compile an extension; install it and run this again"
    fi
fi

if [ ! -x .venv/bin/pip ]; then
    python=${PYTHON:-}
    for candidate in python3.11 python3 python3.12 python3.13; do
        [ -z "$python" ] || break
        "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && python=$candidate
    done
    [ -n "$python" ] || fail "there is no Python 3.11 or later; install it, or set PYTHON to one"
    echo "setup: making .venv with $("$python" --version)"
    "$python" -m venv .venv || fail "$python could not make .venv (on Debian: apt-get install python3-venv)"
fi

# The stamp holds the extras and what they were installed from; "dev" covers the rest.
now=$(cat pyproject.toml scripts/constraints.txt | sha256sum | cut -d' ' -f1)
stamp=.venv/.setup
case "$(cat "$stamp" 2>/dev/null)" in
    "$extras $now" | "all,dev $now") ;;
    *)
        echo "setup: installing into .venv (some minutes the first time)"
        # Two libraries come as sources without a build description: --use-pep517 builds them apart,
        # with any pip, so .venv needs neither setuptools nor wheel for them.
        .venv/bin/python -m pip install --quiet --disable-pip-version-check --use-pep517 \
            -c scripts/constraints.txt -e ".[$extras]"
        echo "$extras $now" >"$stamp"
        ;;
esac

export PATH="$PWD/.venv/bin:$PATH" TORCH_EXTENSIONS_DIR="${TORCH_EXTENSIONS_DIR:-$PWD/.cache/torch_extensions}"
compiled="$TORCH_EXTENSIONS_DIR/.compiled-for"
versions=$(sha256sum <scripts/constraints.txt | cut -d' ' -f1)
if [ "$(cat "$compiled" 2>/dev/null)" != "$versions" ]; then
    echo "setup: compiling DeepSpeed's CPU extension (about 40 s, once)"
    mkdir -p .cache "$TORCH_EXTENSIONS_DIR"
    .venv/bin/python -m adapters.deepspeed >.cache/deepspeed-extension.log 2>&1 ||
        { tail -n 5 .cache/deepspeed-extension.log >&2; fail "that failed; all of it is in .cache/deepspeed-extension.log"; }
    echo "$versions" >"$compiled"
fi
echo "setup: ready; source .venv/bin/activate"
