"""Families of drafters trained alike on one target: tau by prompt set at T = 0 and 1, cost of a round, speed.

    draftloop prepare recipes/families/dflash.yaml data.dir=data --out runs/prepared     the answers, once for all
    cp -r runs/prepared runs/families/FAMILY && draftloop train recipes/families/FAMILY.yaml data.dir=data    each
    python benchmarks/families.py greedy --out FILE      tau at T = 0: the walks of the runs' own test prompts
    python benchmarks/families.py sampled --prompts FILE ... --out FILE     tau at T = 1, the exact offline evaluation
    python benchmarks/families.py speed --prompts FILE ... --out FILE   decoding at batch 1, one after the other
    python benchmarks/families.py confidence --prompts FILE ... --out FILE   what a confidence head saves

The run of a family is RUNS/FAMILY; `ngram` is n-gram lookup, which has none. What OUT already holds is not measured
again, so a part that was cut off goes on with the same command. A family that fails is told in a row of its own, and
costs the others nothing. `results.py` derives results/families.json. Judges nothing.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from run_rows import walks, whole_rows

from draftloop.core.draws import key_of
from draftloop.core.errors import DraftloopError, InputError
from draftloop.core.files import sha256_file
from draftloop.core.law import Sampling
from draftloop.data.prompts import Prompt, read_prompts
from draftloop.data.trunk import Trunk
from draftloop.decode.trace import Options, Request
from draftloop.drafter.build import for_decoding
from draftloop.drafter.ngram import NAME as NGRAM
from draftloop.evaluate.offline import offline
from draftloop.evaluate.speed import compare
from draftloop.evaluate.walk import walk
from draftloop.formats.load import load_drafter
from draftloop.recipe import DataPart, ResponsePart
from draftloop.supervise.lesson import FeatureStore, Lesson
from draftloop.supervise.responses import prepare_trunks
from draftloop.target.load import load_target
from draftloop.train.material import command, hardware, versions

Row = dict[str, Any]
FAMILIES = ("dflash", "eagle3", "dspark", "dflash2", "mtp")
CONFIDENT = ("dspark",)  # families with a confidence head
THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
RULES = ("match", "ratio")


class Book:
    """The raw rows, appended as they are measured."""

    def __init__(self, path: Path) -> None:
        self.path = path
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
        self.done = {(row["kind"], row.get("family")) for row in rows if row["kind"] != "failed"}

    def add(self, rows: Sequence[Row]) -> None:
        """Append rows in one piece."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(row) + "\n" for row in rows)
        with open(self.path, "ab", buffering=0) as handle:  # at once, for parts may be measured side by side
            handle.write(text.encode())
        self.done |= {(row["kind"], row.get("family")) for row in rows}


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    try:
        sys.exit(measure(options))
    except DraftloopError as error:
        print(f"families: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("greedy", "sampled", "speed", "confidence"))
    parser.add_argument("--families", nargs="+", default=[*FAMILIES, NGRAM], help="default: all, and ngram")
    parser.add_argument("--runs", type=Path, default=Path("runs/families"), help="RUNS/FAMILY is a family's run")
    parser.add_argument("--prompts", nargs="+", default=[], help="prompt files")
    parser.add_argument("--out", type=Path, required=True, help="raw rows, JSON lines")
    parser.add_argument("--target", default="smollm2", help="checkpoint folder, hub id, or smollm2")
    parser.add_argument("--device", default="auto", help="auto (default), cpu or cuda")
    parser.add_argument("--max-prompt-tokens", type=int, default=256, help="longer prompts are left out")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="longest answer")
    parser.add_argument("--batch-size", type=int, default=128, help="prompts answered together")
    parser.add_argument("--decode-prompts", type=int, default=12, help="prompts that speed is measured on")
    parser.add_argument("--limit-s", type=int, default=0, help="seconds that one family may take; 0 = any")
    parser.add_argument("--together", type=int, default=1, help="trainings that ran side by side; told in the rows")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> int:
    """Measure what is missing; 1 if a family failed."""
    book = Book(options.out)
    families = CONFIDENT if options.what == "confidence" else options.families
    if options.what == "greedy":
        return each(options, book, families, partial(greedy, options))
    if not options.prompts:
        raise InputError(f"{options.what} needs prompts", where="--prompts", fix="Name the runs' test files.")
    target = load_target(options.target, device=options.device)
    prompts = [prompt for name in options.prompts for prompt in read_prompts([name], Path("."), None)]
    if ("run", None) not in book.done:
        book.add([head_of(options, target)])
    if options.what == "speed":
        return each(options, book, families, partial(speed, options, target, requests_of(options, target, prompts)))
    texts = texts_of(options, target, prompts, 1.0 if options.what == "sampled" else 0.0)
    work = sampled if options.what == "sampled" else confidence
    return each(options, book, families, partial(work, options, target, texts))


def each(options: argparse.Namespace, book: Book, families: Sequence[str], work: Callable[[str], list[Row]]) -> int:
    """Add what comes of every family that is not there; 1 if one failed."""
    failed = 0
    for family in families:
        if (options.what, family) in book.done:
            continue
        began = time.perf_counter()
        try:
            with at_most(options.limit_s):
                book.add(work(family))
            print(f"{options.what} {family}: {time.perf_counter() - began:.1f} s", flush=True)
        except Exception as error:  # whatever it is, the other families go on
            why = " ".join(str(error).split())[:300]
            book.add([{"kind": "failed", "family": family, "what": options.what, "why": why}])
            print(f"{options.what} {family} FAILED: {type(error).__name__}: {why}", file=sys.stderr, flush=True)
            failed = 1
    return failed


def head_of(options: argparse.Namespace, target: Any) -> Row:
    files = {Path(name).name: {"sha256": sha256_file(Path(name))} for name in options.prompts if Path(name).is_file()}
    return {
        "kind": "run",
        "command": command(),
        "versions": versions(),
        "hardware": hardware(),
        "target": f"{target.name} ({target.fingerprint})",
        "dtype": str(target.dtype).removeprefix("torch."),
        "prompts": files,
        "max_prompt_tokens": options.max_prompt_tokens,
        "max_new_tokens": options.max_new_tokens,
        "trained_side_by_side": options.together,
    }


# tau -----------------------------------------------------------------------------------------------------------------
def greedy(options: argparse.Namespace, family: str) -> list[Row]:
    """What the family is, and a tally an answer, as its run walked them: delivered and untrained."""
    run = options.runs / (family if family != NGRAM else next(one for one in options.families if one != NGRAM))
    if not (run / "summary.json").is_file():
        raise InputError("there is no summary", where=str(run), fix="Let the run of this family end.")
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    arms, said = {"untrained": "untrained", summary["delivered"]: "trained"}, account(summary)
    if family == NGRAM:
        arms, said = {NGRAM: "trained"}, {"parameters": 0, "name": summary[NGRAM]["name"]}
    walked = {arms[name]: some for name, some in walks(whole_rows(run / "raw.jsonl")).items() if name in arms}
    said["drafted"] = walked["trained"][0].drafted
    where = {"kind": "tally", "family": family, "temperature": 0.0, "rule": "match"}
    counted = [{**where, "arm": arm, **short(asdict(one.tally))} for arm, some in walked.items() for one in some]
    return [{"kind": "greedy", "family": family, **said}, *counted]


def texts_of(options: argparse.Namespace, target: Any, prompts: list[Prompt], temperature: float) -> list[Trunk]:
    """The target's answers, drawn once."""
    answers = ResponsePart(
        max_new_tokens=options.max_new_tokens, temperature=temperature, batch_size=options.batch_size
    )
    data = DataPart(max_prompt_tokens=options.max_prompt_tokens, response=answers)
    return prepare_trunks(target, prompts, data, options.runs / "answers" / f"t{temperature:g}.jsonl").trunks


def sampled(options: argparse.Namespace, target: Any, texts: list[Trunk], family: str) -> list[Row]:
    """A tally an answer, by both rules."""
    drafter = for_decoding(drafter_of(options, target, family), target)
    rows: list[Row] = [{"kind": "sampled", "family": family}]
    for rule in RULES:
        how = Options(options.max_new_tokens, Sampling(1.0), rule)  # type: ignore[arg-type]
        (found,) = offline(target, [drafter], texts, how)
        where = {"kind": "tally", "family": family, "temperature": 1.0, "rule": rule, "arm": "trained"}
        rows += [{**where, **short(asdict(one))} for one in found]
    return rows


def short(value: Any) -> Any:
    """Six digits of every float: an expected count has no more to say."""
    if isinstance(value, dict):
        return {key: short(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [short(one) for one in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def drafter_of(options: argparse.Namespace, target: Any, family: str) -> Any:
    folder = NGRAM if family == NGRAM else options.runs / family / "drafter"
    drafter = load_drafter(folder, target)
    if drafter.spec.family != family:
        raise InputError(f"this is a {drafter.spec.family} drafter, not {family}", where=str(folder))
    return drafter


def account(summary: Row) -> Row:
    """Size and training, as a run's summary tells them."""
    drafter = summary["drafter"]
    keys = ("name", "steps", "labels", "seconds", "chosen_step", "tau_pooled")
    stages = [{key: stage[key] for key in keys} for stage in summary["stages"]]
    told = {key: drafter[key] for key in ("parameters", "bytes", "block_size", "layers", "target_layers")}
    said = {"command": summary["command"], "delivered": summary["delivered"], "hardware": summary["hardware"]}
    return told | said | {"stages": stages}


def confidence(options: argparse.Namespace, target: Any, texts: list[Trunk], family: str) -> list[Row]:
    """Greedy verification of the drafts that confidence lets through, and of the first n always, on the same texts."""
    drafter = for_decoding(drafter_of(options, target, family), target)
    store = FeatureStore(target, drafter.spec.target_layers, 2**34)
    lessons = [Lesson(trunk) for trunk in texts]
    rows: list[Row] = []
    for way, value in [("first", n) for n in range(1, drafter.spec.drafted + 1)] + [("above", c) for c in THRESHOLDS]:
        how: dict[str, Any] = {"at_most": value} if way == "first" else {"confidence": value}
        for one in walk(drafter, lessons, store, **how):
            rows.append(
                {"kind": "confidence", "family": family, "way": way, "value": value, **short(asdict(one.tally))}
            )
    return rows


# speed ---------------------------------------------------------------------------------------------------------------
def requests_of(options: argparse.Namespace, target: Any, prompts: list[Prompt]) -> list[tuple[str, str, Request]]:
    """Prompts that are short enough, the sets taking turns."""
    from draftloop.data.chat import encode_prompt

    sets: dict[str, list[tuple[str, str, Request]]] = {}
    for prompt in prompts:
        ids = encode_prompt(target.tokenizer, list(prompt.question), template_kwargs={}, tools=prompt.tools)
        if len(ids) <= options.max_prompt_tokens:
            sets.setdefault(prompt.set, []).append((prompt.id, prompt.set, Request(tuple(ids), key_of(prompt.id))))
    turns = [group[i] for i in range(max(map(len, sets.values()))) for group in sets.values() if i < len(group)]
    return turns[: options.decode_prompts]


def speed(options: argparse.Namespace, target: Any, requests: list[tuple[str, str, Request]], family: str) -> list[Row]:
    """Greedy decoding at batch 1, each prompt plain and speculative in turn."""
    drafter = for_decoding(drafter_of(options, target, family), target)
    how = Options(min(128, options.max_new_tokens), batch_size=1)
    plain, (arm,) = compare(target, [(family, drafter)], requests, how)
    told = {key: value for key, value in arm.to_json().items() if key not in ("name", "sets", "break_even_tau")}
    plainly = {"plain_tokens_per_s": plain.tokens_per_s, "plain_ms": plain.ms_per_round}
    where = {"kind": "speed", "family": family, "prompts": len(requests), "max_new_tokens": how.max_new_tokens}
    return [short({**where, **plainly, **told})]


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """End the body by an error after so many seconds; 0 = never."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"it took more than {seconds} s")

    before: Callable[..., Any] | int | None = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


if __name__ == "__main__":
    main()
