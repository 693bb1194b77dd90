#!/usr/bin/env bash
# bash scripts/install_report_tools.sh: install what tests/bench/report opens and compiles a report with: Chromium with
# its driver, pdflatex, pdftoppm (Debian, Ubuntu).  Does nothing where they are there already.
set -euo pipefail

fail() { echo "install_report_tools: $1" >&2; exit 2; }

for command in chromium chromedriver pdflatex pdftoppm; do
    command -v "$command" >/dev/null || missing=1
done
if [ -z "${missing:-}" ]; then
    echo "install_report_tools: all are there"
    exit 0
fi
command -v apt-get >/dev/null || fail "there is no apt-get here; install chromium, chromedriver, pdflatex and pdftoppm"
as_root=()
if [ "$(id -u)" != 0 ]; then
    sudo -n true 2>/dev/null || fail "only root may install packages; run this as root"
    as_root=(sudo -n)
fi
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    chromium chromium-driver texlive-latex-base texlive-latex-recommended texlive-fonts-recommended poppler-utils >/dev/null
echo "install_report_tools: installed"
