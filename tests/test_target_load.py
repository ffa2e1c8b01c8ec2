"""Loading: what cannot be scored exactly, and what is broken, is refused in a sentence that helps."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftloop.core.errors import EnvironmentFault, InputError
from draftloop.core.law import Readout
from draftloop.target import cache, load
from draftloop.target.load import load_target, pick_device, pick_dtype
from tests.tiny import EOS, VOCAB, tiny_model, tiny_target


def words(count: int = VOCAB, eos: int = EOS):
    """A tokenizer of `count` words t0, t1, ..."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(WordLevel({f"t{i}": i for i in range(count)}, unk_token="t0"))
    core.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=f"t{eos}", unk_token="t0")


def rounded():
    """A model whose weights (and nothing else) are bfloat16 numbers."""
    model = tiny_model("llama")
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16())
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A sound checkpoint."""
    folder = tmp_path_factory.mktemp("saved") / "model"
    model = rounded()
    model.save_pretrained(folder)
    words().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "model")


def complaint(source, kind=InputError, **settings) -> str:
    with pytest.raises(kind) as caught:
        load_target(source, **settings)
    assert caught.value.fix, "it must say what to do"
    assert caught.value.where == str(source) or not isinstance(source, str)
    return str(caught.value)


def edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_weights(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


# ---------------------------------------------------------------- sound checkpoints


def test_a_folder_is_the_model_that_was_saved(saved):
    live = load_target(rounded(), tokenizer=words())
    for source in (saved, str(saved)):
        target = load_target(source, dtype="float32")
        assert (target.name, target.dtype, target.eos_ids) == (str(saved), torch.float32, (EOS,))
        assert target.fingerprint == live.fingerprint, "the fingerprint is of the model, not of its place"
    ids = torch.arange(9).unsqueeze(0)
    assert torch.equal(target.model(input_ids=ids).logits, live.model(input_ids=ids).logits)
    assert target.tokenizer.convert_tokens_to_ids("t7") == 7
    half = load_target(saved)
    assert half.dtype == torch.bfloat16
    assert half.fingerprint == live.fingerprint, "the same numbers in fewer bits"


def test_every_end_of_sequence_counts(folder):
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [EOS, 9, 11]}))
    assert load_target(folder, dtype="float32").eos_ids == (EOS, 9, 11)


FULL = ["full_attention"] * 3
OTHERS = {
    "gpt2": ("GPT2", {}),
    "gemma": ("Gemma", {"head_dim": 12}),
    "gemma3, soft cap": ("Gemma3", {"head_dim": 12, "layer_types": FULL, "final_logit_softcapping": 5.0}),
    "granite, logits divided": ("Granite", {"logits_scaling": 3.0, "embedding_multiplier": 2.0}),
    "cohere, logits multiplied": ("Cohere", {"logit_scale": 0.5}),
    "phi3": ("Phi3", {}),
    "olmo2": ("Olmo2", {}),
    "glm4": ("Glm4", {"head_dim": 12}),
    "opt": ("OPT", {"ffn_dim": 64}),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_families_are_found_by_structure(name):
    import transformers

    family, changes = OTHERS[name]
    shared = {
        "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "eos_token_id": EOS,
        "bos_token_id": 1, "pad_token_id": 0, "attn_implementation": "sdpa",
    }  # fmt: skip
    config = getattr(transformers, f"{family}TextConfig" if family == "Gemma3" else f"{family}Config")
    model = getattr(transformers, f"{family}LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")
    torch.manual_seed(0)
    model = model(config(**{**shared, **changes})).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.3)
    target = load_target(model)
    assert target.num_layers == 3
    ids = torch.arange(12).unsqueeze(0)
    rows = target.extend(target.new_cache(12), ids, ids)
    want = model(input_ids=ids).logits
    assert torch.allclose(target.readout.logits(rows.hidden), want, atol=float(1e-5 * want.abs().max()))
    if name.split(", ")[1:]:
        assert target.readout.scale != 1 or target.readout.soft_cap is not None


# ---------------------------------------------------------------- models that are refused


@pytest.mark.parametrize("way", ["eager", "flex_attention"])
def test_attention_that_misreads_the_mask_is_refused(way):
    assert f"attends by `{way}`" in complaint(tiny_model("llama", attn_implementation=way))


def test_layers_that_cannot_be_scored_exactly_are_refused():
    hybrid = tiny_model("qwen3")
    hybrid.config.layer_types = ["full_attention", "linear_attention"] * 2
    assert "['linear_attention'], which we cannot score yet: we lack a recurrent state for every" in complaint(hybrid)
    hybrid.config.layer_types = ["full_attention", "quantum_attention"] * 2
    assert "['quantum_attention']" in complaint(hybrid)
    sliding = tiny_model("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=2)
    sliding.config.sliding_window = None
    assert "names no `sliding_window`" in complaint(sliding)


def test_the_limit_is_where_exactness_ends():
    assert tiny_target("mistral", sliding_window=9).context_limit == 256, "windows are scored exactly"
    assert tiny_target("llama", sliding_window=9).family.kinds == {"full_attention"}, "nobody there reads it"
    from transformers import Phi3Config, Phi3ForCausalLM

    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    settings = {"vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
    config = Phi3Config(
        **settings, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0,
        rope_parameters={**rope, "original_max_position_embeddings": 16}, original_max_position_embeddings=16,
        attn_implementation="sdpa",
    )  # fmt: skip
    assert load_target(Phi3ForCausalLM(config).eval()).context_limit == 16


def test_no_language_model_is_refused():
    assert "no decoder layers or no linear head" in complaint(tiny_model("llama").model)


def wrap(model, change):
    """Let `change` tamper with what the inner forward is given."""
    inner = model.model.forward
    model.model.forward = functools.wraps(inner)(lambda **given: inner(**change(given)))


def drop_mask(model):
    wrap(model, lambda given: {**given, "attention_mask": None})


def drop_positions(model):
    wrap(model, lambda given: {**given, "position_ids": None})


def own_cache(model):
    """A model that keeps its own, appending cache in place of ours."""
    from transformers import DynamicCache

    mine = DynamicCache()
    wrap(model, lambda given: {k: mine if isinstance(v, cache.RowCache) else v for k, v in given.items()})


def louder(model):
    inner = model.lm_head.forward
    model.lm_head.forward = lambda x: 1.01 * inner(x)


def between_layers(model):
    inner = model.model.layers[2].forward
    model.model.layers[2].forward = lambda x, *args, **given: inner(2 * x, *args, **given)
    model.model.layers[2].register_forward_pre_hook(lambda m, args: (1.5 * args[0], *args[1:]))


def crash(model):
    def change(given):
        assert given.get("attention_mask") is None, "4-D masks are beyond me"
        return given

    wrap(model, change)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (drop_mask, "tree mask or readout does not agree"),
        (drop_positions, "does not agree"),
        (own_cache, "cannot run with a tree mask or a cache of ours"),
        (louder, "tree mask or readout does not agree"),
        (between_layers, "the output of its layer 1 cannot be tapped"),
        (crash, "4-D masks are beyond me"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_the_probe_finds_models_that_we_would_score_wrongly(spoil, says):
    model = tiny_model("llama")
    load_target(model)
    spoil(model)
    assert says in complaint(model)


def test_a_cache_that_keeps_what_was_rejected_is_found(monkeypatch):
    def update(layer, key, value, *_, **__):
        """Write where nothing stands yet."""
        if not layer.is_initialized:
            layer.lazy_initialization(key, value)
        at = layer.owner.slots[:, None, :, None].expand_as(key)
        free = layer.keys.gather(2, at) == 0
        for store, new in ((layer.keys, key), (layer.values, value)):
            store.scatter_(2, at, torch.where(free, new, store.gather(2, at)))
        return layer.keys[:, :, : layer.owner.span], layer.values[:, :, : layer.owner.span]

    monkeypatch.setattr(cache._RowLayer, "update", update)
    assert "its cache does not agree" in complaint(tiny_model("llama"))


def test_a_wrong_readout_is_found():
    target = tiny_target("llama")
    for change in ({"scale": 1.01}, {"soft_cap": 30.0}, {"bias": torch.full((VOCAB,), 0.1)}):
        target.readout = dataclasses.replace(Readout(target.model.lm_head.weight), **change)
        with pytest.raises(InputError, match="readout does not agree"):
            load._probe(target)
    target.readout = Readout(target.model.lm_head.weight)
    load._probe(target)


# ---------------------------------------------------------------- broken checkpoints


def test_no_such_folder(tmp_path):
    for source in (str(tmp_path / "no"), "./no/such", "~/no-such-folder-here"):
        with pytest.raises(InputError, match="no such folder"):
            load_target(source)
    assert "cannot be loaded" in complaint("not/a/hub-id")


def test_an_unreachable_hub_is_the_environments_fault(monkeypatch):
    from transformers import AutoModelForCausalLM

    def offline(*_, **__):
        raise OSError("We couldn't connect to 'https://the.hub' to load the files, and couldn't find them")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", offline)
    assert "the hub cannot be reached" in complaint("some/id", EnvironmentFault)

    def full(*_, **__):
        raise MemoryError

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", full)
    assert "does not fit into memory" in complaint("some/id", EnvironmentFault)


def test_pickled_weights(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert "only pickled weights (pytorch_model.bin)" in complaint(folder)
    (folder / "pytorch_model.bin").rename(folder / "model.safetensors")
    assert "pickle, which can run code" in complaint(folder)


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_truncated_weights(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert "Copy or download it again" in complaint(folder)


def test_missing_and_misshapen_tensors(folder):
    edit_weights(folder, lambda t: t.pop("model.layers.2.mlp.up_proj.weight"))
    assert "lacks 1 tensors (model.layers.2.mlp.up_proj.weight" in complaint(folder)
    edit_weights(folder, lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.ones(3, 3)}))
    assert "cannot be loaded" in complaint(folder)


def test_a_missing_shard(folder):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    names = {
        "model.norm.weight": "model-00002-of-00002.safetensors",
        "lm_head.weight": "model-00001-of-00002.safetensors",
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    assert "cannot be loaded" in complaint(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_damaged_weights_are_named_even_where_no_probe_looks(folder, value):
    def spoil(tensors):
        tensors["model.embed_tokens.weight"][VOCAB - 2, 5] = value

    edit_weights(folder, spoil)
    assert "weight model.embed_tokens.weight holds NaN or infinity" in complaint(folder)


def test_logits_that_overflow(folder):
    edit_weights(folder, lambda t: t.update({"lm_head.weight": t["lm_head.weight"] * 1e38}))
    assert "NaN or infinity" in complaint(folder, dtype="float32")


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "many"},
        {"hidden_size": 40},
        {"num_hidden_layers": -1},
        {"num_hidden_layers": 7},
        {"model_type": "no-such-type"},
        {"vocab_size": 7},
        {"rope_parameters": 3},
        {"num_attention_heads": 0},
    ],
    ids=str,
)
def test_a_config_that_does_not_fit(folder, changes):
    edit(folder, **changes)
    complaint(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"model_type": null}'])
def test_a_config_that_is_none(folder, text):
    (folder / "config.json").write_text(text)
    assert "cannot be loaded" in complaint(folder)


def test_tokenizers_of_other_models(folder):
    words(VOCAB + 1).save_pretrained(folder)
    assert f"the tokenizer has {VOCAB + 1} tokens, the model only {VOCAB}" in complaint(folder)
    words(eos=5).save_pretrained(folder)
    assert "ends text with token 5, the model with [3]" in complaint(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink(missing_ok=True)
    assert "the tokenizer cannot be loaded" in complaint(folder)
    assert load_target(folder, tokenizer=words()).tokenizer is not None
    (folder / "tokenizer.json").write_text("{")
    assert "the tokenizer cannot be loaded" in complaint(folder)
    live = tiny_model("llama")
    with pytest.raises(InputError, match="the model only 61"):
        load_target(live, tokenizer=words(70))


def test_code_that_comes_with_a_checkpoint_is_not_run(folder):
    edit(folder, auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}, model_type="no-such-type")
    (folder / "evil.py").write_text("raise SystemExit('ran')\n")
    assert "trust_remote_code" in complaint(folder)


def test_devices_and_types():
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    for device in ("banana", "cuda:99"):
        with pytest.raises(InputError, match="cannot be used here"):
            pick_device(device)
    assert [pick_dtype(d) for d in ("auto", "float32", torch.float64)] == [torch.bfloat16, torch.float32, torch.float64]
    with pytest.raises(InputError, match="float16"):
        pick_dtype("float16")


def test_a_window_by_another_name_limits_the_context():
    """Doge attends sparsely beyond `keep_window_size`: longer texts would be scored wrongly."""
    from draftloop.target.load import load_target

    assert load_target(tiny_model("llama", keep_window_size=24)).context_limit == 24
