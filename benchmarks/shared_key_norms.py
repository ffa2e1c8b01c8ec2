"""A copy of a DFlash drafter whose layers all have the key norm of layer 0.

    python benchmarks/shared_key_norms.py DRAFTER OUT

vLLM 0.32 on a CPU gives every layer's context layer 0's key norm. This copy is not the drafter that was trained; it
shows whether an engine with that fault reads all else as we do.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from draftloop.formats.load import load_drafter
from draftloop.formats.zlab import save_drafter
from draftloop.target.load import load_target


def main() -> int:
    """Make the copy."""
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    drafter = load_drafter(Path(sys.argv[1]), load_target("smollm2"))
    norms = [layer.self_attn.k_norm.weight for layer in drafter.layers]
    with torch.no_grad():
        for norm in norms[1:]:
            norm.copy_(norms[0])
    save_drafter(drafter, Path(sys.argv[2]), extra={"key_norm": "of layer 0 in every layer"})
    return 0


if __name__ == "__main__":
    sys.exit(main())
