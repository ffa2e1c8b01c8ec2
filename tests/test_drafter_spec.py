"""What a drafter is made for, its first weights and its tensors' names; and the embedded target, where it all meets."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftloop.core.errors import InputError
from draftloop.drafter.build import new_drafter
from draftloop.drafter.families import spec_for
from draftloop.drafter.spec import check_fits, choose_mask_token, default_target_layers, left_alone
from draftloop.recipe import DrafterPart
from draftloop.target.load import load_target
from tests.packed import owner as owner
from tests.tiny import EOS, VOCAB, tiny_drafter, tiny_model, tiny_spec, tiny_target

# ---------------------------------------------------------------- which layers


@pytest.mark.parametrize(
    ("layers", "taps", "ids"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (28, 5, (1, 7, 13, 19, 25)),
        (24, 5, (1, 6, 11, 16, 21)),
        (64, 5, (1, 16, 31, 46, 61)),
        (48, 8, (1, 7, 14, 20, 26, 32, 39, 45)),
        (30, 5, (1, 8, 14, 20, 27)),  # 7.5 and 20.5 go to the even neighbour
        (36, 1, (18,)),
        (5, 2, (1, 2)),
        (1, 1, (0,)),
    ],
)
def test_default_target_layers(layers, taps, ids):
    assert default_target_layers(layers, taps) == ids


@given(st.integers(1, 100), st.integers(1, 12))
def test_default_target_layers_are_usable_or_refused(layers, taps):
    if taps > 1 and taps > layers - 3:
        with pytest.raises(InputError, match="target_layers explicitly"):
            default_target_layers(layers, taps)
        return
    ids = default_target_layers(layers, taps)
    assert len(ids) == taps
    assert list(ids) == sorted(set(ids))
    assert ids[0] >= 0
    assert ids[-1] < layers
    if taps > 1:
        assert (ids[0], ids[-1]) == (1, layers - 3)


# ---------------------------------------------------------------- the mask token


class Words:
    """As much of a tokenizer as the choice reads."""

    def __init__(self, size: int, special: dict[str, int], chat_template: str | None = None, **ids: int) -> None:
        self.vocab = {f"w{i}": i for i in range(size) if i not in special.values()} | special
        self.special, self.chat_template = special, chat_template
        for name in ("bos", "eos", "pad", "unk"):
            setattr(self, f"{name}_token_id", ids.get(name))

    def __len__(self) -> int:
        return len(self.vocab)

    def get_vocab(self):
        return self.vocab

    def get_added_vocab(self):
        return self.special

    def convert_tokens_to_ids(self, text):
        return self.vocab.get(text, 0)

    def convert_ids_to_tokens(self, i):
        return next(text for text, j in self.vocab.items() if i == j)


def distinct(ids: torch.Tensor) -> torch.Tensor:
    return torch.eye(64)[ids]


def choose(tokenizer, wanted=None, vocab=10, taken=(), embed=distinct):
    return choose_mask_token(tokenizer, wanted, vocab, set(taken), embed)


def test_a_wanted_mask_token_is_taken_or_refused():
    words = Words(10, {"<m>": 4})
    assert choose(words, 7) == 7
    assert choose(None, 0) == 0
    assert choose(words, "<m>") == 4
    assert choose(words, "w3") == 3
    for wanted in (10, -1, "<none>"):
        with pytest.raises(InputError, match=r"drafter\.mask_token"):
            choose(words, wanted)
    for wanted in ("<m>", None):
        with pytest.raises(InputError, match="tokenizer"):
            choose(None, wanted)


def test_the_order_of_preference():
    special = {"<s>": 0, "<a>": 1, "<b>": 2, "<c>": 3, "<UNUSED_7>": 4, "<mask>": 5}
    words = Words(10, special)
    assert choose(words) == 5
    assert choose(Words(10, special, chat_template="x <mask> y")) == 4, "the template uses it"
    assert choose(words, taken={5}) == 4
    assert choose(Words(10, special, pad=5)) == 4
    plain = {t: i for t, i in special.items() if i < 4}
    assert choose(Words(10, plain), vocab=12) == 10, "a padding row, the published choice for Qwen3"
    holes = Words(10, {**plain, "<far>": 13})
    assert choose(holes, vocab=16) == 14, "behind the last id, not at len(tokenizer)"
    twins = distinct(torch.arange(64))
    twins[3] = 2.5 * twins[2]
    assert choose(Words(10, plain), embed=lambda ids: twins[ids]) == 2, "told apart by nothing but length"
    assert choose(Words(10, plain)) == 0
    assert choose(Words(10, plain, bos=0, eos=1)) == 2
    assert choose(Words(10, {"<s>": 0}, bos=0)) is None, "nothing is unused: a learned vector"
    assert choose(Words(10, {})) is None


def test_left_alone():
    rows = torch.eye(6)
    rows[4], rows[5] = 3 * rows[1], rows[2] + 0.1 * rows[3]
    assert left_alone(rows).tolist() == [False, True, False, False, True, False]
    assert left_alone(rows[:1]).tolist() == [False]


# ---------------------------------------------------------------- specs


def test_a_spec_takes_after_the_target(owner):
    spec = spec_for(DrafterPart(mask_token=5, layers=3, target_layers=[0, 2]), owner)
    assert dataclasses.asdict(spec) == {
        "hidden_size": 48,
        "layers": 3,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 12,
        "intermediate_size": 64,
        "vocab_size": VOCAB,
        "num_target_layers": 4,
        "target_layers": (0, 2),
        "block_size": 8,
        "mask_token_id": 5,
        "learned_mask": False,
        "rope_theta": 10000.0,
        "norm_eps": 1e-6,
        "max_positions": 256,
        "made_for": {"target": owner.name, "target_fingerprint": owner.fingerprint},
    }
    assert spec.drafted == 7
    asked = DrafterPart(mask_token=5, taps=1, heads=6, kv_heads=3, head_dim=10, intermediate_size=20, block_size=4)
    spec = spec_for(asked, owner)
    assert (spec.target_layers, spec.heads, spec.kv_heads, spec.head_dim) == ((2,), 6, 3, 10)
    assert (spec.intermediate_size, spec.drafted) == (20, 3)
    theta = tiny_target("qwen3", rope_parameters={"rope_type": "default", "rope_theta": 5e5}, rms_norm_eps=1e-5)
    spec = spec_for(DrafterPart(mask_token=5, taps=1), theta)
    assert (spec.rope_theta, spec.norm_eps, spec.head_dim) == (5e5, 1e-5, 16)


def test_a_target_that_names_no_widths():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB, n_embd=48, n_layer=4, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=EOS,
        attn_implementation="sdpa",
    )  # fmt: skip
    spec = spec_for(DrafterPart(mask_token=5, taps=1), load_target(GPT2LMHeadModel(config).eval()))
    assert (spec.heads, spec.kv_heads, spec.head_dim, spec.intermediate_size) == (4, 4, 12, 192)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"target_layers": []}, "exist and be strictly ascending"),
        ({"target_layers": [2, 0]}, "exist and be strictly ascending"),
        ({"target_layers": [1, 1]}, "exist and be strictly ascending"),
        ({"target_layers": [0, 4]}, "exist and be strictly ascending"),
        ({"target_layers": [-1]}, "exist and be strictly ascending"),
        ({"taps": 2}, "cannot be spread"),
        ({"taps": 1, "heads": 3}, "cannot share"),
        ({"taps": 1, "head_dim": 7}, "odd"),
        ({"taps": 1, "mask_token": VOCAB}, "outside the vocabulary"),
        ({"taps": 1, "mask_token": None}, "no mask token can be chosen"),
    ],
    ids=str,
)
def test_a_part_that_does_not_fit_the_target(owner, asked, says):
    with pytest.raises(InputError, match=says):
        spec_for(DrafterPart(**{"mask_token": 5, **asked}), owner)


@pytest.mark.parametrize(
    "change",
    [{"block_size": 1}, {"kv_heads": 3}, {"kv_heads": 0}, {"layers": 0}, {"head_dim": 5}, {"mask_token_id": VOCAB}],
    ids=str,
)
def test_impossible_specs(owner, change):
    with pytest.raises(InputError):
        dataclasses.replace(tiny_spec(owner), **change)


def test_a_drafter_is_refused_on_another_target(owner):
    spec = tiny_spec(owner)
    check_fits(spec, owner, "here")
    for other, says in (
        (tiny_target("llama", hidden_size=24), "hidden size 48, this one has 24"),
        (tiny_target("llama", vocab=50), "vocabulary 61, this one has 50"),
        (tiny_target("llama", layers=3), "target layers 4, this one has 3"),
    ):
        with pytest.raises(InputError, match=says) as caught:
            check_fits(spec, other, "here")
        assert caught.value.where == "here"


# ---------------------------------------------------------------- tensors


def test_tensor_names_and_shapes_are_those_of_the_published_checkpoints(owner):
    drafter = tiny_drafter(owner, layers=2, target_layers=(0, 1, 2))
    want = {"fc.weight": (48, 144), "hidden_norm.weight": (48,), "norm.weight": (48,)}
    for n in range(2):
        want |= {
            f"layers.{n}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (48,),
                "post_attention_layernorm": (48,),
                "self_attn.q_proj": (48, 48),
                "self_attn.k_proj": (24, 48),
                "self_attn.v_proj": (24, 48),
                "self_attn.o_proj": (48, 48),
                "self_attn.q_norm": (12,),
                "self_attn.k_norm": (12,),
                "mlp.gate_proj": (64, 48),
                "mlp.up_proj": (64, 48),
                "mlp.down_proj": (48, 64),
            }.items()
        }
    assert {name: tuple(value.shape) for name, value in drafter.state_dict().items()} == want
    assert {name for name, _ in drafter.named_parameters()} == set(want), "embedding and readout stay the target's"
    assert not list(drafter.buffers())
    borrowed = {owner.readout.weight.data_ptr(), owner.model.get_input_embeddings().weight.data_ptr()}
    assert borrowed.isdisjoint(value.data_ptr() for value in drafter.state_dict().values())


def test_first_weights_are_keyed_by_the_seed_alone(owner):
    spec = tiny_spec(owner)
    torch.manual_seed(1)
    one = new_drafter(spec, owner, 7).state_dict()
    torch.manual_seed(2)
    same, other = new_drafter(spec, owner, 7).state_dict(), new_drafter(spec, owner, 8).state_dict()
    for name, value in one.items():
        assert torch.equal(value, same[name])
        assert value.dtype == torch.float32
        assert value.dim() == 1 or not bool((value == other[name]).any()), name
    deeper = new_drafter(dataclasses.replace(spec, layers=3, block_size=2), owner, 7).state_dict()
    assert torch.equal(one["layers.1.mlp.up_proj.weight"], deeper["layers.1.mlp.up_proj.weight"]), "keyed by name"
    assert not torch.equal(one["layers.0.mlp.up_proj.weight"], one["layers.1.mlp.up_proj.weight"])
    golden = [0.01835223101079464, -0.04047866538167, -0.010755105875432491]
    assert torch.allclose(one["fc.weight"][0, :3], torch.tensor(golden), rtol=1e-5), one["fc.weight"][0, :3].tolist()


def test_first_weights_are_normal_with_the_deviations_that_we_say(owner):
    spec = dataclasses.replace(tiny_spec(owner), layers=2, intermediate_size=400)
    for name, value in new_drafter(spec, owner).state_dict().items():
        if value.dim() == 1:
            assert torch.equal(value, torch.ones_like(value)), name
            continue
        n = value.numel()
        z = value.double().flatten() / (0.01 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02)
        assert abs(z.mean()) < 5 / math.sqrt(n), name
        assert abs(z.std() - 1) < 5 / math.sqrt(2 * n), name
        assert abs(z.pow(4).mean() - 3) < 5 * math.sqrt(96 / n), name
        assert abs((z[1:] * z[:-1]).mean()) < 5 / math.sqrt(n), name


# ---------------------------------------------------------------- on the embedded target


@pytest.fixture(scope="module")
def smollm2():
    return load_target("smollm2", dtype="float32")


@pytest.mark.smollm2
def test_the_mask_token_of_smollm2_is_one_that_training_left_alone(smollm2):
    spec = spec_for(DrafterPart(), smollm2)
    chosen = spec.mask_token_id
    assert chosen in {5, *range(7, 17)}
    unit = torch.nn.functional.normalize(smollm2.embed(torch.arange(17)), dim=-1)
    others = [i for i in (5, *range(7, 17)) if i != chosen]
    assert float((unit[others] @ unit[chosen]).min()) > 0.999
    assert float((unit[[0, 1, 2, 3, 4, 6]] @ unit[chosen]).max()) < 0.999
    assert spec.target_layers == (1, 27)
    assert (spec.hidden_size, spec.head_dim, spec.kv_heads, spec.rope_theta) == (576, 64, 3, 1e5)


@pytest.mark.smollm2
@torch.no_grad()
def test_packed_is_cached_on_smollm2(smollm2):
    ids = smollm2.tokenizer("Speculative decoding drafts several tokens and lets the target verify them.").input_ids
    ids = torch.tensor([ids, ids[::-1]])
    n = ids.shape[1]
    spec = spec_for(DrafterPart(block_size=5), smollm2)
    drafter = new_drafter(spec, smollm2)
    for weight in drafter.parameters():
        weight.mul_(4 if weight.dim() > 1 else 1)
    place = torch.arange(n).expand(2, -1)
    features = smollm2.extend(smollm2.new_cache(n), ids, place, spec.target_layers).features
    anchor = torch.tensor([[3, 7, n - 1], [1, 5, 10]])
    packed = drafter.readout.logits(drafter(features, anchor, ids.gather(1, anchor)))
    cache = drafter.new_cache(n)
    drafter.extend(cache, features, place)
    for j in range(3):
        single = drafter.readout.logits(drafter.begin(cache, anchor[:, j], ids.gather(1, anchor)[:, j]))
        assert float((packed[:, j] - single).abs().max() / single.abs().max()) < 1e-4
        assert float(single.std()) > 0.1, "a law that says nothing would prove nothing"


def test_a_tiny_tied_model_shares_its_matrix_with_the_drafter():
    target = load_target(tiny_model("llama", tie_word_embeddings=True))
    drafter = tiny_drafter(target)
    assert drafter.readout.weight.data_ptr() == target.model.get_input_embeddings().weight.data_ptr()
