"""`make bench` runs, at toy size: every part has its rows and the raw file says what it was measured with. No timings."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

RUN = Path(__file__).parent.parent / "benchmarks" / "run.py"


def bench(*arguments):
    return subprocess.run([sys.executable, RUN, *arguments], capture_output=True, text=True, check=False)


def test_quick(tmp_path):
    done = bench("--quick", "--threads", "1", "--out", tmp_path / "raw.json")
    assert done.returncode == 0, done.stderr
    for word in ("round cost", "to chunk 512", "single/packed", "draft_opd", "speculative"):
        assert word in done.stdout
    found = json.loads((tmp_path / "raw.json").read_text(encoding="utf-8"))
    assert found["command"].startswith("run.py --quick")
    assert found["versions"]["torch"]
    assert found["hardware"]["cpu_cores"]
    rows = {part: [row for row in found["rows"] if row["part"] == part] for part in ("decode", "train", "draft")}
    assert [(row["batch_size"], row["arm"]) for row in rows["decode"]] == [
        (size, arm) for size in (1, 2) for arm in ("plain", "speculative")
    ]
    for plain, drafted in zip(rows["decode"][::2], rows["decode"][1::2], strict=True):
        assert abs(drafted["round_cost"] - drafted["ms_per_round"] / plain["ms_per_round"]) < 1e-9
        assert drafted["tau"] >= 1
    wanted = [(kind, chunk) for kind in ("ce", "forward_kl", "draft_opd") for chunk in (64, 512, 4096)]
    assert [(row["objective"], row["chunk"]) for row in rows["train"]] == wanted
    assert all(row["labels"] > 0 for row in rows["train"])
    assert all(row["ratio_to_512"] == 1 for row in rows["train"] if row["chunk"] == 512)
    assert [row["anchors"] for row in rows["draft"]] == [4, 8]


def test_bad_arguments(tmp_path):
    done = bench("--target", tmp_path / "none", "--out", tmp_path / "raw.json")
    assert done.returncode == 2
    assert done.stderr.strip().splitlines() == [
        f"bench: {tmp_path / 'none'}: there is no such folder. Check the spelling of the path."
    ]
    assert not list(tmp_path.iterdir())
