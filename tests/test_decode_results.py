"""results/decode.json from raw rows: headline, round cost, and rows that a kill cut off."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = str(Path(__file__).parents[1] / "benchmarks")


@pytest.fixture
def derived(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    import decode_results

    yield decode_results
    sys.modules.pop("decode_results", None)


def cell(arm, engine, ms, rate, responses, batch=1, temperature=0.0):
    return {
        "kind": "cell", "batch": batch, "temperature": temperature, "arm": arm, "engine": engine, "kernel": "sdpa",
        "ms_per_round": ms, "tokens_per_s": rate, "rounds": 1, "tokens": 1, "seconds": 1.0, "responses": responses,
    }  # fmt: skip


HEAD = {
    "kind": "run", "command": "decode.py", "hardware": {"gpu": "X"}, "versions": {"torch": "1", "transformers": "2"},
    "drafter": {"from": "d", "block_size": 8}, "at_s": 0.1,
}  # fmt: skip
ROWS = [
    HEAD,
    {"kind": "check", "same": 8, "prompts": 8, "at_s": 1},
    cell("plain", "eager", 0.1, 9000.0, [[10, 10]]),
    cell("plain", "graph", 2.0, 500.0, [[10, 10]]),
    cell("speculative", "graph", 3.0, 900.0, [[30, 10], [30, 20]]),
    cell("plain", "fused", 1.0, 1000.0, [[10, 10]]),
    cell("speculative", "fused", 1.5, 1800.0, [[36, 12], [24, 18]]),
    cell("plain", "tuned", 0.8, 1200.0, [[10, 10]]),
    cell("plain", "graph", 2.0, 4000.0, [[10, 10]], batch=8),
    cell("speculative", "graph", 5.0, 3000.0, [[30, 15]], batch=8),
    {"kind": "generation", "batch": 4, "engine": "graph", "kernel": "sdpa", "tokens_per_s": 6.4, "prompts": 8,
     "tokens": 64, "seconds": 10.0, "ms_per_round": 1.0},
    {"kind": "failed", "why": "no memory."},
]  # fmt: skip


def test_headline_and_cells(derived, tmp_path):
    raw = tmp_path / "raw.jsonl"
    raw.write_text("".join(json.dumps(row) + "\n" for row in ROWS) + '{"kind": "cell", "ba', encoding="utf-8")
    (text,) = derived.derive([raw]).values()
    found = json.loads(text)
    assert found["engines_b1"] == {"plain": "tuned, sdpa", "speculative": "fused, sdpa"}
    assert (found["plain_tokens_per_s_b1"], found["tau_b1"]) == (1200.0, 2.0)
    assert found["speculative_over_plain_b1"] == 1.5
    assert found["same_tokens"]
    by_place = {(one["batch"], one["engine"]): one for one in found["cells"]}
    assert by_place[8, "graph"]["round_cost"] == 2.5
    assert not by_place[8, "graph"]["pays"]
    assert by_place[1, "graph"]["speculative"]["tau"] == 2.0
    page = derived.table([raw])
    assert "| 8 | 0 | graph | sdpa | 4000 | 2.000 | 3000 | 5.000 | 2.50 | 2.00 | 0.75 (SLOWER) | 0.80 |" in page
    assert "Not measured: no memory." in page


def test_one_wrong_token_is_told(derived, tmp_path):
    rows = [HEAD, {"kind": "check", "same": 7, "prompts": 8}, *ROWS[3:5]]
    assert not derived.summarise(rows)["same_tokens"]
    raw = tmp_path / "raw.jsonl"
    rows.append({"kind": "check", "rule": "ratio", "same": 8, "prompts": 8, "dtype": "torch.float64"})
    raw.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert "in float32 for 7 of 8 answers, in float64 for 8 of 8 answers." in derived.table([raw])
    assert not derived.summarise([HEAD, *ROWS[3:5]])["same_tokens"]  # nothing was checked


def test_nothing_measured_is_nothing(derived, tmp_path):
    assert derived.derive([tmp_path / "none.jsonl"]) == {}
    assert derived.table([tmp_path / "none.jsonl"]) == ""


@pytest.mark.slow
def test_ways_of_compiling_are_compared_at_toy_size(derived, tmp_path):
    """Fails if a way is not measured, or writes other tokens than the eager loop."""
    raw, picture = tmp_path / "raw.jsonl", tmp_path / "profile.txt"
    arguments = ["--quick", "--device", "cpu", "--ways", "joined:matmul"]
    command = [sys.executable, f"{FOLDER}/decode_compare.py", *arguments, "--out", raw, "--profile", picture]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = derived.summarise(derived.read(raw))
    assert found["same_tokens"]
    assert found["failed"] == []
    places = {(cell["batch"], cell["temperature"], cell["engine"], cell["kernel"]) for cell in found["cells"]}
    assert places == {(batch, t, "joined", "matmul") for batch in (1, 2) for t in (0, 1)}
    assert "engine joined" in picture.read_text(encoding="utf-8")


def test_the_benchmark_runs_at_toy_size(derived, tmp_path):
    """Every part has its rows, tokens are the eager loop's, nothing failed. No timings, nothing compiled."""
    raw, picture = tmp_path / "raw.jsonl", tmp_path / "profile.txt"
    arguments = ["--quick", "--device", "cpu", "--fused", "--out", raw, "--profile", picture]
    command = [sys.executable, f"{FOLDER}/decode.py", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = derived.summarise(derived.read(raw))
    assert found["same_tokens"]
    assert found["failed"] == []
    places = {(cell["batch"], cell["temperature"], cell["engine"]) for cell in found["cells"]}
    assert places == {(1, 0, "graph"), (1, 0, "eager"), (2, 0, "graph"), (1, 1, "graph"), (2, 1, "graph")}
    assert all({"plain", "speculative"} <= set(cell) for cell in found["cells"])
    assert len(found["generation"]) == 2
    assert found["settings"]["versions"]["torch"]
    assert "gaps" in picture.read_text(encoding="utf-8")
