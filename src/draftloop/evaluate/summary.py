"""What a run found, as one record: the typed form of summary.json.

Knows nothing of models, tables or charts: the screen and the report read this record and nothing else. Writers may
add keys of their own anywhere; the keys below are required and checked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationError, model_validator

from draftloop.core.errors import DraftloopError, InputError
from draftloop.core.files import write_json
from draftloop.evaluate.tau import Acceptance, Interval

SCHEMA = 1
FILE = "summary.json"


class Part(BaseModel):
    """A section: the keys below are required, others are kept, NaN and infinity are refused."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, populate_by_name=True)


class TargetFacts(Part):
    """The verifier."""

    name: str
    fingerprint: str
    parameters: int
    dtype: str


class DrafterFacts(Part):
    """The drafter; `bytes` is the size of its checkpoint, `block_size` counts the anchor slot.

    With a learned mask vector `mask_token_id` is null and `mask_token` says so.
    """

    family: str
    parameters: int
    bytes: int
    block_size: int
    layers: int
    target_layers: list[int]
    mask_token_id: int | None
    mask_token: str | None


class Split(Part):
    """One split of the data; `sets` counts prompts by set."""

    prompts: int
    responses: int
    tokens: int
    sets: dict[str, int]


class Overlap(Part):
    """How much of the test prompts also occurs in training, by n-grams of length `n`; shares in 0..1."""

    n: int
    share_of_ngrams: float
    share_of_prompts: float


class DataFacts(Part):
    """Prompts by split."""

    train: Split
    validation: Split | None
    test: Split | None
    overlap: Overlap | None


class Cells(Part):
    """The row of the method table that a stage trained."""

    trunks: str
    anchors: str
    proposals: str
    objective: str


class ValidationPoint(Part):
    """One validation walk; `step` counts optimiser steps from the stage's start."""

    step: int
    tau_pooled: float


class SetResult(Part):
    """One prompt set: tau in tokens per verification, with the 95 % interval of `tau_pooled` (null of one response)."""

    tau_pooled: float
    tau_mean: float
    interval: Interval | None


class PositionCount(Part):
    """Drafted tokens of the training blocks at one position."""

    accepted: int
    rejected: int


class BlockSplit(Part):
    """What became of the drafted tokens that a stage was trained on, in tokens (and `blocks`, in blocks)."""

    accepted: int
    first_rejected: int
    later_rejected: int
    blocks: int
    full_blocks: int
    by_position: list[PositionCount]


class Stage(Part):
    """One stage and its drafter on the test prompts; the first is `untrained`, or `init` (no method, no steps).

    `steps` are optimiser steps, `labels` the drafted positions that were supervised, `seconds` the training time, and
    `chosen_step` the checkpoint that validation chose. Acceptance as in `draftloop.evaluate.tau.Acceptance`.
    """

    name: str
    start: str | None
    method: str | None
    cells: Cells | None
    steps: int
    labels: int
    seconds: float
    chosen_step: int | None
    tau_pooled: float
    tau_mean: float
    interval: Interval | None
    per_position: list[float | None]
    conditional: list[float | None]
    sets: dict[str, SetResult]
    validation: list[ValidationPoint]
    split: BlockSplit | None
    delivered: bool


class Gain(Part):
    """tau_pooled of the delivered drafter over the first one, with its paired 95 % interval."""

    ratio: float
    interval: Interval | None


class Lookup(Part):
    """N-gram lookup on the same trunks, the drafter that nobody has to train; named with its settings.

    `gain` is tau_pooled of the delivered drafter over the lookup's.
    """

    name: str
    tau_pooled: float
    tau_mean: float
    interval: Interval | None
    per_position: list[float | None]
    sets: dict[str, SetResult]
    gain: Gain


class Plain(Part):
    """Plain decoding with the same loop: one token a step."""

    tokens_per_s: float
    ms_per_token: float


class Arm(Part):
    """Speculative decoding with one drafter, named as its stage.

    `round_cost` is the time of a round over that of a plain step, `break_even_tau` the tau above which a round pays,
    `speedup` tokens per second over plain's (below 1 = a slowdown). `sets` may hold the same by prompt set.
    """

    name: str
    tau_pooled: float
    tokens_per_s: float
    ms_per_round: float
    round_cost: float
    break_even_tau: float
    speedup: float
    sets: dict[str, Any]


class Decoding(Part):
    """Measured decoding speed; prefill excluded."""

    batch_size: int
    dtype: str
    prompts: int
    max_new_tokens: int
    plain: Plain
    arms: list[Arm]


class AuditArm(Part):
    """Whether one arm's output equals plain decoding's, and where it first differs.

    `at_ties` counts the responses that part from plain decoding at a near-tie, which `equal` forgives.
    """

    name: str
    equal: StrictBool
    first_difference: Any
    at_ties: int = 0


class Audit(Part):
    """Token-for-token comparison with plain greedy decoding.

    `near_ties` counts the tokens whose two largest logits lie closer than `gap`.
    """

    dtype: str
    prompts: int
    tokens: int
    equal: StrictBool
    near_ties: int
    gap: float | None
    arms: list[AuditArm]


class Summary(Part):
    """A whole run; see the sections. `seconds` is wall-clock time, `created` ISO 8601."""

    schema_version: int = Field(alias="schema")
    name: str
    command: str
    created: str
    seconds: float
    versions: dict[str, Any]
    hardware: dict[str, Any]
    target: TargetFacts
    drafter: DrafterFacts
    data: DataFacts
    stages: list[Stage] = Field(min_length=1)
    delivered: str
    gain: Gain | None
    ngram: Lookup | None = None
    decoding: Decoding | None
    lossless: bool | None
    audit: Audit | None

    @model_validator(mode="after")
    def _agree(self) -> Summary:
        if self.schema_version != SCHEMA:
            raise ValueError(f"schema {self.schema_version} is not {SCHEMA}, the one that this version reads")
        names = [stage.name for stage in self.stages]
        if len(set(names)) < len(names):
            raise ValueError("two stages have the same name")
        for index, stage in enumerate(self.stages[1:], 1):
            if stage.start not in (None, "init", "previous", *names[:index]):
                raise ValueError(f"stage {stage.name!r} starts from {stage.start!r}, which is no earlier stage")
        if [stage.name for stage in self.stages if stage.delivered] != [self.delivered]:
            raise ValueError(f"delivered is {self.delivered!r}, but the stages do not mark that one alone as delivered")
        if self.audit is not None and self.lossless is None:
            raise ValueError("lossless is null, but there is an audit")
        outcomes = [self.audit.equal, *(arm.equal for arm in self.audit.arms)] if self.audit else []
        if self.lossless and not all(outcomes):
            raise ValueError("lossless is true, but the audit, or an arm of it, is not equal")
        return self

    @property
    def first(self) -> Stage:
        """The drafter before training."""
        return self.stages[0]

    @property
    def best(self) -> Stage:
        """The stage whose drafter is delivered."""
        return next(stage for stage in self.stages if stage.delivered)

    @property
    def arm(self) -> Arm | None:
        """The delivered drafter's decoding speed, where it was measured."""
        arms = self.decoding.arms if self.decoding else []
        return next((arm for arm in arms if arm.name == self.delivered), None)


def acceptance_fields(acceptance: Acceptance) -> dict[str, Any]:
    """Name the acceptance keys of a `Stage`: verify steps become `verifications`, since its `steps` are optimiser's."""
    fields = acceptance.to_json()
    verifications = fields.pop("steps")
    return {**fields, "verifications": verifications}


def check_summary(value: Mapping[str, Any], *, where: str) -> Summary:
    """Check a JSON object and type it.

    Args:
        value: JSON object.
        where: what to call it in an error.

    Raises:
        InputError: a key is missing or wrong.
    """
    try:
        return Summary.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        what = f"{key}: {first['msg']}" if key else first["msg"].removeprefix("Value error, ")
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise InputError(
            f"{what}{more}", where=where, fix=f"It must follow schema {SCHEMA} of this version."
        ) from error


def write_summary(run_dir: Path, value: Mapping[str, Any]) -> Path:
    """Check `value` and write it to summary.json in one piece.

    Returns:
        The file's path.

    Raises:
        DraftloopError: the record is not valid, or holds NaN.
        EnvironmentFault: the file cannot be written.
    """
    path = run_dir / FILE
    check_summary(value, where=str(path))
    try:
        write_json(path, dict(value))
    except (TypeError, ValueError) as error:
        raise DraftloopError(f"the summary is not JSON ({error})", where=str(path)) from error
    return path


def read_summary(run_dir: Path) -> Summary:
    """Read and check the summary.json of a run directory.

    Raises:
        InputError: there is none, or it is not a summary.
    """
    path = run_dir / FILE
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError("there is no summary", where=str(path), fix="Give the directory of a finished run.") from error
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", where=str(path)) from error
    except ValueError as error:
        raise InputError(f"not JSON ({error})", where=str(path), fix="Run the training command again.") from error
    if not isinstance(value, dict):
        raise InputError("not a JSON object", where=str(path), fix="Run the training command again.")
    return check_summary(value, where=str(path))
