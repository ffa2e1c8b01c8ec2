"""One training step under torch.profiler, by method: kernels, the time none ran, and where the host's time goes.

    python benchmarks/profile_step.py --drafter DIR --data FILE --out results/raw/profile-step-NAME.txt
    python benchmarks/profile_step.py --quick --device cpu --out FILE    a toy: does it run?

The batch is the one of recipes/bundled.yaml (32 answers of at most 256 tokens, 64 anchors each), its features already
computed. By phase, what calls what taken apart: `host` = until the call returns, waits for the device included;
`alone` = with the device brought to rest before and after. The learning rate is 0: every step is the same.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import lessons_of
from phases import PHASES, watching
from profile_round import listing
from run import quick_target, requests_of

from draftloop.core.errors import DraftloopError
from draftloop.data.chat import encode_prompt
from draftloop.data.prompts import read_prompts
from draftloop.data.trunk import response_trunk
from draftloop.decode.loop import decode
from draftloop.decode.trace import Options, Request
from draftloop.drafter.build import new_drafter
from draftloop.drafter.compiled import compile_layers
from draftloop.drafter.families import spec_for
from draftloop.formats.load import load_drafter
from draftloop.learn import update
from draftloop.objective.terms import needs_teacher
from draftloop.recipe import DrafterPart, OptimiserPart, StagePart
from draftloop.supervise import batch
from draftloop.supervise.drafting import training_products
from draftloop.supervise.lesson import FeatureStore, Lesson
from draftloop.target.load import load_target
from draftloop.train.material import command, hardware, versions
from draftloop.train.optimiser import DrafterOptimiser

SIZES = {"lessons": 32, "anchors": 64, "chunk": 4096, "tokens": 256, "turns": 5}
METHODS = ("sft", "overlap", "draft-opd", "specopd")


def step_of(target: Any, drafter: Any, lessons: list[Lesson], method: str, options: argparse.Namespace) -> Any:
    """A step as a run makes it."""
    stage = StagePart.model_validate({"name": "profile", "method": method, "anchors_per_sequence": options.anchors,
                                      "objective": {"chunk": options.chunk}})  # fmt: skip
    precision = torch.bfloat16 if target.device.type == "cuda" else torch.float32
    confidence = update.confidence_weight(stage.objective, drafter)
    store = FeatureStore(target, drafter.spec.target_layers, 2**34)
    drafter.train().requires_grad_(True)
    optimiser = DrafterOptimiser(drafter.named_parameters(), OptimiserPart())

    @training_products(precision)
    def step() -> None:
        scored = batch.supervise(
            stage, lessons, [0] * len(lessons), target=target, drafter=drafter, store=store, seed=0,
            need_teacher=needs_teacher(stage.objective, confidence), precision=precision,
        )  # fmt: skip
        learnt = update.differentiate(stage.objective, [scored], drafter, target.readout, precision)
        optimiser.step(learnt.loss, 0.0, 1)

    return step


def trunks_of(target: Any, options: argparse.Namespace) -> list[Any]:
    """The target's greedy answers to the first prompts of at most 256 tokens."""
    requests = requests_of(target, options.lessons)
    if options.data and not options.quick:
        prompts = read_prompts([options.data], Path("."), 20 * options.lessons)
        texts = [encode_prompt(target.tokenizer, list(p.question), template_kwargs={}, tools=p.tools) for p in prompts]
        requests = [Request(tuple(ids), i) for i, ids in enumerate(texts) if len(ids) <= 256][: options.lessons]
    made = decode(target, None, requests, Options(options.tokens, batch_size=len(requests)))
    both = enumerate(zip(requests, made, strict=True))
    return [response_trunk(asked.ids, one.tokens, f"{i}", "", 0, one.finished) for i, (asked, one) in both]


def profiled(target: Any, drafter: Any, trunks: list[Any], method: str, options: argparse.Namespace) -> str:
    """The account of one method."""
    cuda = target.device.type == "cuda"
    rest: Callable[[], None] = torch.cuda.synchronize if cuda else lambda: None
    step = step_of(target, drafter, lessons_of(target, drafter, trunks, method, options.tokens), method, options)
    for _ in range(3):  # compiles and allocates
        step()
    walls, by_phase = [], []
    for _ in range(options.turns):
        rest()
        begun = time.perf_counter()
        step()
        rest()
        walls.append(1e3 * (time.perf_counter() - begun))
    for border in (lambda: None, rest):
        with watching(border) as seconds:
            for _ in range(options.turns):
                step()
            rest()
        by_phase.append({phase: 1e3 * seconds[phase] / options.turns for phase in PHASES})
    lines = [f"== {method}: {statistics.median(walls):.2f} ms a step", f"{'phase':<18} {'host ms':>9} {'alone ms':>9}"]
    lines += [f"{phase:<18} {by_phase[0][phase]:9.2f} {by_phase[1][phase]:9.2f}" for phase in PHASES]
    print("\n".join(lines), flush=True)
    return "\n".join([*lines, listing(method, step, cuda, "step")])


def main() -> int:
    """Print the tables as they come; write them and the kernels to the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="toy sizes on a random target")
    parser.add_argument("--target", default="smollm2", help="checkpoint folder, hub id or smollm2 (default)")
    parser.add_argument("--drafter", type=Path, help="drafter folder; default: an untrained one")
    parser.add_argument("--data", help="prompts to answer; default: the ones that come with the project")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--device", default="auto", help="auto (default), cpu or cuda")
    parser.add_argument("--compile-drafter", action="store_true", help="as the recipe's compile_drafter")
    parser.add_argument("--out", type=Path, required=True, help="text file for the whole account")
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    options = parser.parse_args()
    if options.quick:
        options.lessons, options.anchors, options.tokens, options.turns = 2, 4, 12, 1
    try:
        target = quick_target() if options.quick else load_target(options.target, device=options.device)
        if options.drafter and not options.quick:
            drafter = load_drafter(options.drafter, target, dtype=torch.float32)
        else:
            toy: dict[str, Any] = {"target_layers": [0, 2], "mask_token": 5} if target.num_layers < 8 else {"taps": 2}
            drafter = new_drafter(spec_for(DrafterPart(block_size=8, layers=2, **toy), target), target)
        if options.compile_drafter:
            compile_layers(drafter)
        trunks = trunks_of(target, options)
        texts = [f"{command()}\n{versions()}\n{hardware()}"]
        for method in options.methods:
            texts.append(profiled(target, drafter, trunks, method, options))
            options.out.write_text("\n\n".join(texts) + "\n", encoding="utf-8")  # what was measured stays after a kill
    except DraftloopError as error:
        print(f"profile_step: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
