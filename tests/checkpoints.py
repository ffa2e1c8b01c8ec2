"""Drafters with loud weights, their checkpoints, and what spoils one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from draftloop.core.errors import InputError
from draftloop.drafter.dflash import DFlash
from draftloop.drafter.spec import DFlashSpec
from draftloop.formats.load import load_drafter

SPEC = DFlashSpec(
    hidden_size=6, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate_size=10, vocab_size=20, num_target_layers=9,
    target_layers=(1, 4, 7), block_size=5, mask_token_id=19, rope_theta=1e6, norm_eps=1e-5, max_positions=333,
    made_for={"target": "somebody/something", "target_fingerprint": "0123456789abcdef"},
)  # fmt: skip


def loose(spec: DFlashSpec = SPEC, seed: int = 0) -> DFlash:
    """An unbound drafter with loud weights, among them the floats that careless code loses."""
    drafter = DFlash(spec)
    generator = torch.Generator().manual_seed(seed)
    odd = torch.tensor([-0.0, 1e-40, -3.1e38, 1.1754944e-38, 1 + 2**-23])
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 3)
            flat = weight.view(-1)
            flat[: min(5, flat.numel())] = odd[: min(5, flat.numel())]
    return drafter


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def same_bits(a: DFlash, b: DFlash) -> bool:
    mine, theirs = a.state_dict(), b.state_dict()
    if {n: (t.dtype, t.shape) for n, t in mine.items()} != {n: (t.dtype, t.shape) for n, t in theirs.items()}:
        return False
    return all(torch.equal(bits(mine[n]), bits(theirs[n])) for n in mine)


def edit(folder: Path, **changes) -> None:
    """Change keys of config.json; `None` removes one, `nested__x` reaches into dflash_config."""
    config = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        place = config["dflash_config"] if key.startswith("nested__") else config
        key = key.removeprefix("nested__")
        if value is None:
            place.pop(key, None)
        else:
            place[key] = value
    (folder / "config.json").write_text(json.dumps(config))


def retensor(folder: Path, change) -> None:
    """Rewrite model.safetensors by `change(tensors)`, which edits in place or returns another dictionary."""
    tensors = {k: v.clone() for k, v in load_file(folder / "model.safetensors").items()}
    save_file(change(tensors) or tensors, folder / "model.safetensors")
    unpair(folder)


def unpair(folder: Path) -> None:
    """Let config.json accept other weights than those that it was saved with."""
    ours = json.loads((folder / "config.json").read_text())["draftloop"]
    ours.pop("weights_sha256", None)
    edit(folder, draftloop=ours)


def refused(folder, *words: str, target=None) -> InputError:
    """Loading fails as the user's input (status 2), in one sentence that holds these words and a second that helps."""
    with pytest.raises(InputError) as caught:
        load_drafter(folder, target)
    text = str(caught.value)
    assert caught.value.exit_code == 2
    assert "\n" not in text
    assert caught.value.fix, text
    assert str(folder) in text
    for word in words:
        assert word in text, text
    return caught.value


@st.composite
def specs(draw) -> DFlashSpec:
    vocab = draw(st.integers(2, 40))
    depth = draw(st.integers(1, 40))
    kv_heads = draw(st.integers(1, 3))
    return DFlashSpec(
        hidden_size=draw(st.integers(1, 9)),
        layers=draw(st.integers(1, 12)),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 3)),
        intermediate_size=draw(st.integers(1, 9)),
        vocab_size=vocab,
        num_target_layers=depth,
        target_layers=tuple(sorted(draw(st.sets(st.integers(0, depth - 1), min_size=1, max_size=5)))),
        block_size=draw(st.integers(2, 33)),
        mask_token_id=draw(st.integers(0, vocab - 1)),
        rope_theta=draw(st.floats(1e-3, 1e12)),
        norm_eps=draw(st.floats(1e-12, 1.0)),
        max_positions=draw(st.integers(33, 1 << 20)),
        made_for=draw(st.dictionaries(st.text(), st.one_of(st.text(), st.integers(), st.none()), max_size=3)),
    )
