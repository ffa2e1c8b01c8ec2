"""The learned mask vector: for a target without an unused token, trained, saved beside the published tensors, read back."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from draftloop.core.errors import InputError
from draftloop.drafter.build import for_decoding, new_drafter
from draftloop.drafter.dflash import DFlash
from draftloop.drafter.families import spec_for
from draftloop.drafter.spec import choose_mask_token, stand_in
from draftloop.formats.load import load_drafter
from draftloop.formats.tensors import published_shapes
from draftloop.formats.zlab import save_drafter
from draftloop.recipe import DrafterPart, OptimiserPart
from draftloop.recipe_file import load_recipe
from draftloop.train import checkpoint, job
from draftloop.train.job import train
from draftloop.train.optimiser import DrafterOptimiser
from draftloop.train.stage import StageRun
from tests.packed import owner as owner
from tests.test_drafter_spec import Words
from tests.tiny import EOS, VOCAB, tiny_drafter, tiny_spec
from tests.toy_run import toy_recipe, toy_tokenizer

FILES = ["config.json", "mask_embedding.safetensors", "model.safetensors"]


def learned(owner, seed: int = 0, **changes) -> DFlash:
    """A drafter with loud matrices and a mask vector of its own."""
    drafter = new_drafter(dataclasses.replace(tiny_spec(owner), learned_mask=True, **changes), owner, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in drafter.parameters():
            if weight.dim() > 1:
                weight.mul_(8)
        drafter.mask_embedding.copy_(torch.randn(owner.hidden_size, generator=generator))
    return drafter


def blocks(drafter: DFlash, seed: int = 0):
    """Features [1, 9, F * H], anchors [1, 4] and their tokens."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(1, 9, drafter.fc.in_features, generator=generator)
    return features, torch.tensor([[1, 4, 4, 9]]), torch.randint(0, VOCAB, (1, 4), generator=generator)


def cached(drafter: DFlash, features, anchor, tokens) -> torch.Tensor:
    rows = []
    for at, token in zip(anchor[0].tolist(), tokens[0], strict=True):
        cache = drafter.new_cache(at)
        drafter.extend(cache, features[:, :at], torch.arange(at).unsqueeze(0))
        rows.append(drafter.begin(cache, torch.tensor([at]), token.view(1))[0])
    return torch.stack(rows).unsqueeze(0)


def put(folder: Path, **tensors: torch.Tensor) -> None:
    save_file(tensors, folder / "mask_embedding.safetensors")


def config_key(folder: Path, key: str, value) -> None:
    """Set a key under `draftloop` in config.json; None removes it."""
    config = json.loads((folder / "config.json").read_text())
    config["draftloop"] = {k: v for k, v in (config["draftloop"] | {key: value}).items() if v is not None}
    (folder / "config.json").write_text(json.dumps(config))


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(InputError) as caught:
        load_drafter(folder)
    text = str(caught.value)
    assert "\n" not in text
    assert caught.value.fix
    assert str(folder) in text
    for word in words:
        assert word in text, text


# ---------------------------------------------------------------- who gets one


def test_it_is_asked_for_by_its_word_or_taken_where_nothing_is_unused():
    full = Words(10, {"<s>": 0}, bos=0)
    spare = Words(10, {"<s>": 0, "<mask>": 4}, bos=0)
    for tokenizer, wanted, chosen in [
        (full, None, None),
        (full, "learned", None),
        (None, "learned", None),
        (full, 3, 3),
        (spare, None, 4),
        (spare, "learned", None),
    ]:
        assert choose_mask_token(tokenizer, wanted, 10, set(), lambda ids: torch.eye(10)[ids]) == chosen
    with pytest.raises(InputError, match="or to learned"):
        choose_mask_token(full, "<none>", 10, set(), lambda ids: torch.eye(10)[ids])


def test_the_stand_in_is_padding_else_an_end():
    assert stand_in(Words(10, {}, pad=6, eos=7), (8,), 10) == 6
    assert stand_in(Words(10, {}, pad=10, eos=7), (8,), 10) == 8, "padding behind the readout"
    assert stand_in(Words(10, {}, eos=7), (), 10) == 7
    assert stand_in(None, (EOS,), 10) == EOS
    assert stand_in(None, (), 10) == 0


def test_a_spec_records_it(owner):
    spec = spec_for(DrafterPart(mask_token="learned", taps=1), owner)
    assert (spec.learned_mask, spec.mask_token_id) == (True, EOS)
    assert not spec_for(DrafterPart(mask_token=EOS, taps=1), owner).learned_mask


def test_it_begins_as_the_mean_of_the_embedding_and_only_where_the_spec_says_so(owner):
    spec = tiny_spec(owner)
    plain = new_drafter(spec, owner)
    drafter = new_drafter(dataclasses.replace(spec, learned_mask=True), owner)
    mean = owner.model.get_input_embeddings().weight.double().mean(0).float()
    assert torch.equal(drafter.mask_embedding.detach(), mean)
    assert drafter.mask_embedding.requires_grad
    assert drafter.state_dict().keys() - plain.state_dict().keys() == {"mask_embedding"}
    assert all(torch.equal(drafter.state_dict()[name], value) for name, value in plain.state_dict().items())
    assert plain.mask_embedding is None


# ---------------------------------------------------------------- what it computes


def test_packed_is_cached(owner):
    drafter = learned(owner)
    given = blocks(drafter)
    packed = drafter(*given).detach()
    assert float((packed - cached(drafter, *given)).abs().max() / packed.abs().max()) < 1e-5


def test_with_a_tokens_embedding_for_a_vector_it_is_the_drafter_of_that_token(owner):
    plain = tiny_drafter(owner, mask=5)
    drafter = learned(owner, mask_token_id=EOS)
    drafter.load_state_dict({**plain.state_dict(), "mask_embedding": owner.embed(torch.tensor(5))})
    given = blocks(drafter)
    assert torch.equal(drafter(*given), plain(*given))
    assert torch.equal(cached(drafter, *given), cached(plain, *given))
    with torch.no_grad():
        drafter.mask_embedding.add_(0.5)
    for path in (lambda d: d(*given), lambda d: cached(d, *given)):
        assert not torch.allclose(path(drafter), path(plain), atol=1e-3)


def test_the_stand_ins_embedding_is_never_used(owner):
    one, other = learned(owner, mask_token_id=EOS), learned(owner, mask_token_id=7)
    given = blocks(one)
    assert torch.equal(one(*given), other(*given))
    assert torch.equal(cached(one, *given), cached(other, *given))


@pytest.mark.parametrize("autocast", [False, True])
def test_training_moves_it_without_weight_decay(owner, autocast):
    drafter = learned(owner)
    before = drafter.mask_embedding.detach().clone()
    optimiser = DrafterOptimiser(drafter.named_parameters(), OptimiserPart(lr=1e-2, weight_decay=0.5))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = drafter(*blocks(drafter)).float().square().sum() + drafter(*blocks(drafter, 1))[..., 0].float().sum()
    loss.backward()
    gradient = drafter.mask_embedding.grad.clone()
    assert gradient.dtype == torch.float32
    assert int((gradient != 0).sum()) == owner.hidden_size
    optimiser.step(loss, 1.0, 1)
    # Adam's first step is the learning rate against the gradient's sign; decay would add 0.005 times the weight
    assert torch.allclose(drafter.mask_embedding.detach() - before, -1e-2 * gradient.sign(), atol=1e-4)


def test_a_copy_for_decoding_has_its_own(owner):
    drafter = learned(owner)
    twin = for_decoding(drafter, owner)
    assert torch.equal(twin.mask_embedding, drafter.mask_embedding)
    assert twin.mask_embedding.data_ptr() != drafter.mask_embedding.data_ptr()
    assert not twin.mask_embedding.requires_grad


# ---------------------------------------------------------------- saved and read back


@pytest.fixture
def saved(owner, tmp_path) -> Path:
    return save_drafter(learned(owner), tmp_path / "drafter", dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_round_trip_keeps_every_bit(owner, tmp_path, dtype):
    drafter = learned(owner)
    with torch.no_grad():
        drafter.mask_embedding[:3] = torch.tensor([-0.0, 1e-40, -3.1e38])
    folder = save_drafter(drafter, tmp_path / "d", dtype=dtype)
    assert sorted(p.name for p in folder.iterdir()) == FILES
    assert load_file(folder / "model.safetensors").keys() == published_shapes(drafter.spec).keys()
    config = json.loads((folder / "config.json").read_text())
    assert config["draftloop"]["learned_mask"] is True
    assert config["dflash_config"]["mask_token_id"] == drafter.spec.mask_token_id
    loaded = load_drafter(folder, owner)
    assert loaded.spec == drafter.spec
    assert loaded.mask_embedding.requires_grad
    for name, tensor in drafter.state_dict().items():
        mine = loaded.state_dict()[name]
        assert torch.equal(mine.view(torch.uint8), tensor.to(dtype).view(torch.uint8)), name
    again = save_drafter(loaded, tmp_path / "again", dtype=dtype)
    assert all((again / name).read_bytes() == (folder / name).read_bytes() for name in FILES)


def test_what_is_loaded_drafts_the_same(owner, saved):
    drafter = learned(owner)
    given = blocks(drafter)
    assert torch.equal(load_drafter(saved, owner)(*given), drafter(*given))


def test_one_drafter_over_another(owner, saved):
    """With a vector over without, and back: nothing of the one before is left."""
    plain, other = tiny_drafter(owner), learned(owner, 1)
    save_drafter(plain, saved, dtype=torch.float32)
    assert sorted(p.name for p in saved.iterdir()) == ["config.json", "model.safetensors"]
    assert load_drafter(saved).spec == plain.spec
    save_drafter(other, saved, dtype=torch.float32)
    assert sorted(p.name for p in saved.iterdir()) == FILES
    assert torch.equal(load_drafter(saved).mask_embedding, other.mask_embedding)


@pytest.mark.parametrize("moves", [0, 1, 2])
def test_a_save_killed_between_two_files_is_noticed(owner, saved, monkeypatch, moves):
    done = []

    def replace(source, target, real=os.replace):
        if Path(target).parent == saved:
            if len(done) == moves:
                raise KeyboardInterrupt
            done.append(Path(target).name)
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        save_drafter(learned(owner, 1), saved, dtype=torch.float32)
    monkeypatch.undo()
    assert done == ["model.safetensors", "mask_embedding.safetensors"][:moves]
    if moves:
        refused(saved, "two different saves")
    else:
        assert torch.equal(load_drafter(saved).mask_embedding, learned(owner).mask_embedding)


def test_a_vector_that_is_not_whole_is_refused(owner, saved):
    width = owner.hidden_size
    good = load_file(saved / "mask_embedding.safetensors")["mask_embedding"].clone()
    for bad in (float("nan"), float("inf")):
        hurt = good.clone()
        hurt[-1] = bad
        put(saved, mask_embedding=hurt)
        refused(saved, "mask_embedding", "NaN or infinity")
    for shape in ([width + 1], [1, width], []):
        put(saved, mask_embedding=torch.zeros(shape))
        refused(saved, "learned mask vector has shape", str(shape), f"[{width}]")
    put(saved, mask_embedding=torch.zeros(width, dtype=torch.int8))
    refused(saved, "quantised")
    put(saved, mask_embedding=good, norm=good.clone())
    refused(saved, "must hold one tensor")
    put(saved, other=good)
    refused(saved, "must hold one tensor", "other")
    put(saved, mask_embedding=good + 1)
    refused(saved, "two different saves", "mask_sha256")
    config_key(saved, "mask_sha256", None)
    assert torch.equal(load_drafter(saved).mask_embedding.detach(), good + 1), "changed on purpose"
    (saved / "mask_embedding.safetensors").write_bytes(b"\x80\x04.")
    refused(saved, "mask_embedding.safetensors")
    (saved / "mask_embedding.safetensors").unlink()
    refused(saved, "mask_embedding.safetensors is missing")


def test_a_vector_and_a_config_that_disagree_are_refused(owner, saved, tmp_path):
    config_key(saved, "learned_mask", "yes")
    refused(saved, 'learned_mask is "yes"')
    config_key(saved, "learned_mask", None)
    refused(saved, "does not promise")
    (saved / "mask_embedding.safetensors").unlink()
    refused(saved, "two different saves")  # its hash is still there: a vector is not lost in silence

    plain = save_drafter(tiny_drafter(owner), tmp_path / "plain")
    config_key(plain, "learned_mask", True)
    refused(plain, "promises a learned mask vector", "missing")


def test_a_stray_vector_is_not_overwritten_and_nan_not_saved(owner, tmp_path):
    put(tmp_path, mask_embedding=torch.zeros(3))
    with pytest.raises(InputError, match="without a config.json"):
        save_drafter(learned(owner), tmp_path)
    drafter = learned(owner)
    with torch.no_grad():
        drafter.mask_embedding[0] = float("nan")
    with pytest.raises(InputError, match="mask_embedding of the drafter holds NaN"):
        save_drafter(drafter, tmp_path / "d")
    assert [p.name for p in tmp_path.iterdir()] == ["mask_embedding.safetensors"]


# ---------------------------------------------------------------- in a run


@pytest.fixture(scope="module")
def full(tmp_path_factory) -> Path:
    """A recipe for a toy target whose chat template knows every special token, so that none is unused."""
    folder = tmp_path_factory.mktemp("full")
    stage = {"name": "sft", "method": "sft", "steps": 6, "evaluations": 2, "optimiser": {"lr": 3e-3}}
    recipe = toy_recipe(folder, stages=[stage], evaluate={"decode_prompts": 1, "audit_prompts": 1})
    tokenizer = toy_tokenizer()
    tokenizer.chat_template += "{# <|endoftext|> <mask> #}"
    tokenizer.save_pretrained(folder / "target")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    return folder


def run(folder: Path, out: Path, overrides=()) -> str:
    said: list[str] = []
    train(load_recipe(folder / "recipe.yaml", overrides), out=out, quiet=True, say=said.append)
    return "\n".join(said)


def test_a_run_without_an_unused_token_learns_one_says_so_and_resumes(full, tmp_path, monkeypatch):
    monkeypatch.setattr(job, "write_report", lambda folder: None)
    said = run(full, tmp_path / "whole")
    assert said.count("vocabulary has no unused token, so the drafted slots hold a learned mask vector") == 1
    assert said.count("vLLM and SGLang read one only from mask_embedding.pt") == 1
    assert "unused" not in run(full, tmp_path / "asked", ["drafter.mask_token=learned", "stages.sft.steps=1"])

    update, steps = StageRun._update, []

    def stopped(self, step):
        steps.append(step)
        if len(steps) == 5:
            raise KeyboardInterrupt
        return update(self, step)

    monkeypatch.setattr(StageRun, "_update", stopped)
    with pytest.raises(KeyboardInterrupt):
        run(full, tmp_path / "stopped")
    state = checkpoint.load(tmp_path / "stopped" / "checkpoints")
    assert state is not None
    assert state.step == 3
    assert "mask_embedding" in state.drafter
    assert any("mask_embedding" in name for name in state.optimiser)
    monkeypatch.setattr(StageRun, "_update", update)
    assert "Going on with stage sft at step 3" in run(full, tmp_path / "stopped")
    for name in FILES[1:]:
        mine, theirs = (tmp_path / out / "drafter" / name for out in ("whole", "stopped"))
        assert mine.read_bytes() == theirs.read_bytes(), name

    facts = json.loads((tmp_path / "whole" / "summary.json").read_text())["drafter"]
    assert (facts["mask_token_id"], facts["mask_token"]) == (None, "a learned vector")
    assert facts["bytes"] == sum((tmp_path / "whole" / "drafter" / name).stat().st_size for name in FILES[1:])
    loaded = load_drafter(tmp_path / "whole" / "drafter")
    first = beginning_of(full, loaded)
    assert loaded.spec.learned_mask
    assert float((loaded.mask_embedding.detach() - first).abs().max()) > 1e-3, "it was trained"


def beginning_of(folder: Path, drafter: DFlash) -> torch.Tensor:
    """The vector that the drafter began with."""
    weight = load_file(folder / "target" / "model.safetensors")["model.embed_tokens.weight"]
    return weight.double().mean(0).float().to(drafter.mask_embedding.dtype)


def test_a_run_with_an_unused_token_has_no_vector(full, tmp_path, monkeypatch):
    monkeypatch.setattr(job, "write_report", lambda folder: None)
    said = run(full, tmp_path / "run", ["drafter.mask_token=<mask>", "stages.sft.steps=1"])
    assert "learned" not in said
    assert sorted(p.name for p in (tmp_path / "run" / "drafter").iterdir()) == ["config.json", "model.safetensors"]
