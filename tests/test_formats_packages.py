"""Our exports in the classes of those who defined the forms: the same logits, to 1e-4 in float32. On demand.

pip install --no-deps dflash==0.1.0                # z-lab's class
pip install speculators==0.9.0                     # or --no-deps, with loguru, openai, pydantic-settings, hs-connectors
python -m pytest -q -s tests/test_formats_packages.py
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from draftloop.formats.export import export
from draftloop.target.load import load_target
from tests.tiny import tiny_drafter, tiny_model

pytestmark = pytest.mark.slow

CLOSE = 1e-4


def missing(package: str) -> bool:
    return importlib.util.find_spec(package) is None


def scene(kind: str, folder: Path, form: str):
    """A target with its folder, a drafter for it, its export, features of a text, and an anchor behind the text."""
    model = tiny_model(kind)
    model.save_pretrained(folder / "target")
    target = load_target(model)
    drafter = tiny_drafter(target, target_layers=(0, 1, 3), block=5)
    made = export(drafter, folder / "out", engine="vllm", form=form, target_name=str(folder / "target"), target_architectures=[type(model).__name__], dtype=torch.float32)  # fmt: skip
    ids = torch.randint(4, target.vocab_size, (1, 11), generator=torch.Generator().manual_seed(0))
    taps = drafter.spec.target_layers
    features = target.extend(target.new_cache(16), ids, torch.arange(11)[None], taps).features
    return model, target, drafter, made.folder, ids, features


def ours(target, drafter, features, token: int) -> torch.Tensor:
    """[K, V] logits of the block behind the text."""
    at = torch.tensor([[features.shape[1]]])
    hidden = drafter(features, at, torch.tensor([[token]]))
    return target.readout.logits(hidden[0, 0])


@pytest.mark.skipif(missing("dflash"), reason="the package dflash (z-lab's class) is not installed")
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_zlabs_class_gives_our_logits(tmp_path, kind):
    from dflash import DFlashDraftModel, extract_context_feature

    model, target, drafter, folder, ids, features = scene(kind, tmp_path, "zlab")
    theirs, info = DFlashDraftModel.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"], info
    assert not info["unexpected_keys"], info
    assert (theirs.block_size, theirs.mask_token_id) == (5, drafter.spec.mask_token_id)
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states
        # the last state is normed there, so layer 3 of 4 is compared by our tap
        context = extract_context_feature(states, theirs.target_layer_ids[:2])
        wide = context.shape[-1]
        assert torch.allclose(context, features[..., :wide], atol=1e-5)
        block = torch.full((1, 5), theirs.mask_token_id)
        block[:, 0] = 7
        hidden = theirs.eval()(
            target_hidden=features,
            noise_embedding=model.get_input_embeddings()(block),
            position_ids=torch.arange(16)[None],
        )
        logits = theirs.compute_logits(hidden[:, 1:], model.lm_head)[0]
        difference = float((logits - ours(target, drafter, features, 7)).abs().max())
    print(
        f"\nz-lab's class, {kind}: largest difference of logits {difference:.1e} (size {float(logits.abs().max()):.1f})"
    )
    assert difference < CLOSE


@pytest.mark.skipif(missing("speculators"), reason="the package speculators is not installed")
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_the_speculators_class_gives_our_logits(tmp_path, kind):
    from speculators import DFlashDraftModel, SpeculatorModel

    _, target, drafter, folder, _, features = scene(kind, tmp_path, "speculators")
    theirs = SpeculatorModel.from_pretrained(folder, dtype=torch.float32)
    assert isinstance(theirs, DFlashDraftModel)
    theirs.load_verifier_weights()
    theirs = theirs.float().eval()
    spec = drafter.spec
    assert (theirs.block_size, theirs.mask_token_id) == (spec.block_size, spec.mask_token_id)
    assert list(theirs.target_layer_ids) == [k + 1 for k in spec.target_layers]
    mine = dict(drafter.state_dict())
    stored = {name: tensor for name, tensor in theirs.state_dict().items() if name in mine}
    assert stored.keys() == mine.keys()
    assert all(torch.equal(stored[name], mine[name]) for name in mine)
    with torch.no_grad():
        hidden = theirs.hidden_norm(theirs.fc(features))
        block = torch.full((1, 5), theirs.mask_token_id)
        block[:, 0] = 7
        x = theirs.embed_tokens(block)
        positions = torch.arange(16)[None]
        turned = theirs.rotary_emb(features, positions)
        for layer in theirs.layers:
            layer.self_attn.config._attn_implementation = "eager"
            mask = torch.zeros(1, 1, 5, 16)
            x = layer(hidden_states=x, target_hidden=hidden, attention_mask=mask, position_ids=positions, use_cache=False, position_embeddings=turned)  # fmt: skip
            x = x[0] if isinstance(x, tuple) else x
        logits = theirs.lm_head(theirs.norm(x))[0, 1:]
        difference = float((logits - ours(target, drafter, features, 7)).abs().max())
    print(f"\nspeculators' class, {kind}: largest difference {difference:.1e} (size {float(logits.abs().max()):.1f})")
    assert difference < CLOSE
