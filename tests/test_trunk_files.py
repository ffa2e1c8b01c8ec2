"""Rows of trunks kept in memory, on disk or computed again are the same bits; files that do not belong are never read."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
from safetensors import SafetensorError

from draftloop.core import weights
from draftloop.core.blocks import Blocks
from draftloop.core.errors import EnvironmentFault
from draftloop.data.trunk import Trunk
from draftloop.recipe import Recipe
from draftloop.supervise import lesson as lesson_module
from draftloop.supervise.disk import TrunkFiles, files_of
from draftloop.supervise.lesson import FeatureStore, Lesson
from draftloop.supervise.score import scored_rows
from draftloop.train.job import train
from tests.hybrid_tiny import hybrid_target
from tests.lessons import Counted
from tests.tiny import VOCAB, tiny_target
from tests.toy_run import toy_recipe

TAPS = (0, 2)
LENGTHS = (19, 8, 30, 12)


def lessons() -> list[Lesson]:
    draw = torch.Generator().manual_seed(3)
    texts = [torch.randint(0, VOCAB, (n,), generator=draw).tolist() for n in LENGTHS]
    return [
        Lesson(Trunk(f"p{i}", "", 0, tuple(t), (False,) + (True,) * (len(t) - 1), False)) for i, t in enumerate(texts)
    ]


@cache
def targets(kind: str):
    return tiny_target(kind) if kind == "qwen3" else hybrid_target(kind)


@pytest.fixture(scope="module")
def target():
    return targets("qwen3")


def rows_of(lesson: Lesson) -> list[torch.Tensor]:
    state = [] if lesson.state is None else [lesson.state.hidden, *(t for pair in lesson.state.layers for t in pair)]
    return [t.clone() for t in (lesson.features, lesson.hidden, *state)]


def visited(store: FeatureStore, work: list[Lesson], rounds: int = 3) -> list[list[torch.Tensor]]:
    """What each visit of each lesson, alone, finds."""
    found = []
    for _ in range(rounds):
        for lesson in work:
            store.fill([lesson])
            found.append(rows_of(lesson))
            in_use = sum(one.state.nbytes for one in work if one.state is not None)
            assert in_use <= store.budget
            store.release([lesson])
            assert sum(one.nbytes for one in work) <= max(store.budget, 0)
    return found


def same(a, b) -> bool:
    return all(
        len(x) == len(y) and all(torch.equal(s, t) for s, t in zip(x, y, strict=True))
        for x, y in zip(a, b, strict=True)
    )


def whole_size(target, keep: bool) -> int:
    work = lessons()
    FeatureStore(target, TAPS, 1e9, keep).fill(work)
    return max(one.nbytes for one in work)


@pytest.mark.parametrize("keep", [False, True], ids=["features", "states"])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_next", "qwen4_exp"])
def test_memory_disk_and_recomputing_give_the_same_bits(kind, keep, tmp_path):
    target = targets(kind)
    room = whole_size(target, keep)
    memory, disk, again = Counted(target), Counted(target), Counted(target)
    want = visited(FeatureStore(memory, TAPS, 1e9, keep), lessons())
    # memory for the longest trunk alone: it makes way for the others and they for it
    store = FeatureStore(disk, TAPS, room, keep, TrunkFiles(tmp_path / "features", 1e9))
    assert same(want, visited(store, lessons()))
    assert store.left_out == 0
    assert memory.texts == disk.texts == len(LENGTHS)
    bare = visited(FeatureStore(again, TAPS, room if keep else 0, keep), lessons())
    assert same([one[:2] for one in want], [one[:2] for one in bare])
    assert again.texts > len(LENGTHS)
    with_states = [(a, b) for a, b in zip(want, bare, strict=True) if len(b) > 2]
    assert same(*zip(*with_states, strict=True)) if with_states else not keep


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_next", "qwen4_exp"])
def test_branches_on_states_from_disk_score_alike(kind, tmp_path):
    target = targets(kind)
    anchors = torch.tensor([4, 7, 3, 2])
    tokens = torch.randint(0, VOCAB, (4, 5), generator=torch.Generator().manual_seed(0))
    valid = torch.ones_like(tokens, dtype=torch.bool)
    blocks = Blocks(torch.arange(4), anchors, tokens, valid, valid)
    kept = lessons()
    FeatureStore(target, TAPS, 1e9, True).fill(kept)
    want = scored_rows(target, kept, blocks)
    work = lessons()
    first = FeatureStore(target, TAPS, 1e9, True, TrunkFiles(tmp_path / "features", 1e9))
    first.fill(work)
    first.budget = 0  # all of it goes to disk
    first.release(work)
    assert not any(one.nbytes for one in work)
    first.budget = 1e9
    first.fill(work)
    assert all(one.state is not None for one in work)
    assert torch.equal(scored_rows(target, work, blocks), want)
    bare = lessons()
    again = scored_rows(target, bare, blocks)
    assert float((again - want).abs().max() / want.abs().max()) < 1e-5


def test_a_batch_never_loses_a_lesson_that_is_in_use(target, tmp_path):
    store = FeatureStore(target, TAPS, whole_size(target, True), True, TrunkFiles(tmp_path / "features", 1e9))
    work = lessons()
    visited(store, work, 1)
    store.fill(work)
    assert all(one.features is not None and one.hidden is not None for one in work)
    assert sum(one.state.nbytes for one in work if one.state is not None) <= store.budget
    assert store.left_out, "memory for one state is not enough for four at once"
    store.release(work)
    assert sum(one.nbytes for one in work) <= store.budget


def test_a_later_process_reads_what_an_earlier_one_left(target, tmp_path):
    def store(counted):
        return FeatureStore(counted, TAPS, 0, False, TrunkFiles(tmp_path / "features", 1e9))

    first, second = Counted(target), Counted(target)
    want = visited(store(first), lessons(), 1)
    (left,) = (tmp_path / "features").iterdir()
    (left / ".half.part").write_bytes(b"x")
    assert same(want, visited(store(second), lessons(), 1))
    assert (first.texts, second.texts) == (4, 0)
    assert len(list(left.iterdir())) == 4, "what a killed write left is removed"


def test_forwards_are_shared_alike_whatever_an_earlier_process_left(target, tmp_path, monkeypatch):
    """Fails if what is on disk is not computed beside what is missing, or if groups depend on what is there."""
    monkeypatch.setattr(lesson_module, "slots_at_once", lambda target: 40)  # trunks of 8, 12; of 19; of 30

    def read_ahead() -> tuple[list[list[torch.Tensor]], list[int], int]:
        counted, work = Counted(target), lessons()
        store = FeatureStore(counted, TAPS, 0, False, TrunkFiles(tmp_path / "features", 1e9))
        done = list(store.read_ahead(work))
        texts = counted.texts
        store.fill(work)
        assert counted.texts == texts, "all are kept"
        return [rows_of(one) for one in work], done, texts

    want, done, texts = read_ahead()
    assert (done, texts) == ([2, 3, 4], 4)
    (left,) = (tmp_path / "features").iterdir()
    shortest = min(left.iterdir(), key=lambda file: file.stat().st_size)
    shortest.unlink()  # as if it had been killed before the last file
    again, done, texts = read_ahead()
    assert (done, texts) == ([2, 3, 4], 2), "computed in the forward that it shared the first time"
    assert same(want, again)


@pytest.mark.parametrize("change", ["taps", "states", "weights", "target"])
def test_files_of_anything_else_are_removed_unread(target, tmp_path, change):
    own = tiny_target("qwen3")
    folder = tmp_path / "features"
    visited(FeatureStore(own, TAPS, 0, False, TrunkFiles(folder, 1e9)), lessons(), 1)
    (left,) = folder.iterdir()
    taps, keep = ((1, 2) if change == "taps" else TAPS), change == "states"
    if change == "weights":
        with torch.no_grad():
            own.model.model.layers[1].self_attn.v_proj.weight.mul_(1.5)
    other = Counted(tiny_target("qwen3", seed=1) if change == "target" else own)
    want = visited(
        FeatureStore(tiny_target("qwen3", seed=1) if change == "target" else own, taps, 0, keep), lessons(), 1
    )
    store = FeatureStore(other, taps, 0, keep, TrunkFiles(folder, 1e9))
    assert not left.exists()
    assert same(want, visited(store, lessons(), 1))
    assert other.texts == 4


def test_states_with_snapshots_elsewhere_are_removed_unread(tmp_path):
    target = hybrid_target("qwen3_next")
    folder = tmp_path / "features"
    visited(FeatureStore(target, TAPS, 0, True, TrunkFiles(folder, 1e9)), lessons(), 1)
    (left,) = folder.iterdir()
    target.family = target.family.spaced(4)
    FeatureStore(target, TAPS, 0, True, TrunkFiles(folder, 1e9))
    assert not left.exists()


def test_new_weights_in_mid_run_begin_new_files(target, tmp_path):
    own = tiny_target("qwen3")
    store = FeatureStore(own, TAPS, 0, False, TrunkFiles(tmp_path / "features", 1e9))
    work = lessons()
    before = visited(store, work, 1)
    with torch.no_grad():
        own.model.model.layers[1].self_attn.v_proj.weight.mul_(1.5)
    own.touch()
    after = visited(store, work, 2)
    assert not torch.equal(before[0][1], after[0][1])
    assert same(after[:4], after[4:])
    assert same(after[:4], visited(FeatureStore(own, TAPS, 0), lessons(), 1))


def test_a_damaged_file_is_computed_again(target, tmp_path):
    store = FeatureStore(target, TAPS, 0, False, TrunkFiles(tmp_path / "features", 1e9))
    work = lessons()
    want = visited(store, work, 1)
    (left,) = (tmp_path / "features").iterdir()
    for path, damage in zip(sorted(left.iterdir()), (b"", b"\x00" * 40, None, None), strict=True):
        path.unlink() if damage is None else path.write_bytes(damage)
    assert same(want, visited(store, work, 1))
    assert same(want, visited(store, work, 1))


def test_the_files_keep_their_budget(target, tmp_path):
    folder = tmp_path / "features"
    counted = Counted(target)
    store = FeatureStore(counted, TAPS, 0, False, TrunkFiles(folder, 14_000))
    want = visited(FeatureStore(target, TAPS, 0), lessons())
    assert same(want, visited(store, lessons()))
    sizes = [path.stat().st_size for path in folder.rglob("*.safetensors")]
    assert sizes
    assert sum(sizes) <= 14_000
    assert 4 < counted.texts < 12, "some are read, the others are computed each time"


def test_a_full_disk_is_one_sentence(target, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(weights, "save_file", full)
    store = FeatureStore(target, TAPS, 0, False, TrunkFiles(tmp_path / "features", 1e9))
    with pytest.raises(EnvironmentFault, match=r"the disk is full\. Free some space or lower feature_disk_gb"):
        visited(store, lessons(), 1)
    assert not list((tmp_path / "features").rglob("*.part"))


def test_each_process_has_its_share(tmp_path):
    for rank in range(3):
        (tmp_path / f"rank{rank}" / "x").mkdir(parents=True)
    mine = files_of(tmp_path, 100.0, 0, 2)
    assert mine is not None
    assert mine.budget == 50
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0", "rank1"]
    assert files_of(tmp_path, 0) is None
    assert not tmp_path.exists()


@pytest.mark.filterwarnings("error:feature_memory_gb")
@pytest.mark.parametrize("proposals", ["trunk", "sampled"])
def test_a_run_is_the_same_from_disk(tmp_path, proposals):
    def losses(name: str, **budgets) -> list[float]:
        part = {"name": "one", "proposals": proposals, "objective": {"kind": "e2e_tv"}, "branch": {"state": "keep"}}
        stage = {**part, "steps": 4, "evaluations": 1, "batch_size": 3}
        more = {"stages": [stage], "evaluate": {"decode_prompts": 0, "audit_prompts": 0}, **budgets}
        recipe = Recipe.model_validate({**toy_recipe(tmp_path), **more})
        folder = train(recipe, out=tmp_path / name, quiet=True, say=lambda text: None)
        assert not (folder / "features").exists(), "a complete run needs it no more"
        rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        return [row["loss"] for row in rows if "loss" in row]

    want = losses("memory")
    assert len(want) == 4
    gb = 300_000 / 2**30  # a few trunks with their states
    assert losses("disk", feature_memory_gb=gb, feature_disk_gb=1.0) == want
