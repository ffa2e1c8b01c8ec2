"""The typed recipe: everything a run does, in one file, and nothing that is silently ignored.

Knows no model and runs nothing. A method is a row of cells (trunks, anchors, proposals, objective); `METHODS`
(recipe_methods.py) names the usual rows, and a stage may change any cell. Reading, overrides and error messages are in
`recipe_file.py`.
"""

from __future__ import annotations

import math
from difflib import get_close_matches
from typing import Annotated, Any, Literal, get_args

from pydantic import ConfigDict, Field, field_validator, model_validator

from draftloop.recipe_families import COMPILED, why_strange
from draftloop.recipe_methods import METHODS, merged
from draftloop.recipe_parts import Part as Part
from draftloop.recipe_parts import ResponsePart as ResponsePart
from draftloop.recipe_parts import StopPart as StopPart
from draftloop.recipe_parts import TargetPart as TargetPart
from draftloop.recipe_parts import no_overflow

SCHEMA = 1

Source = Literal["trunk", "sampled", "recorded", "redraft"]


class DataPart(Part):
    """Prompt files (JSON lines or Parquet; `prompt`, `messages`, `conversations` or `turns`)."""

    dir: str = Field(".", description="folder that relative file names start from")
    train: list[str] = Field(default_factory=list, description="prompt files; `builtin:train` = the ones we ship")
    validation: list[str] = Field(default_factory=list, description="choose the checkpoint; empty = split off train")
    test: list[str] = Field(default_factory=list, description="reported once, at the end; empty = split off train")
    held_out: int | None = Field(
        None, ge=1, description="most prompts split off for validation, and as many for test; default: a tenth of train"
    )
    limit: int | None = Field(None, ge=1, description="at most so many prompts of a split, held-out ones included")
    max_prompt_tokens: int = Field(1024, ge=1, description="longer prompts are left out (and counted)")
    template_kwargs: dict[str, Any] = Field(default_factory=dict, description="passed to the chat template")
    response: ResponsePart = Field(default_factory=ResponsePart)


class DrafterPart(Part):
    """The model that proposes."""

    family: Literal["dflash", "eagle3", "dspark", "dflash2", "mtp"] = Field(
        "dflash",
        description="architecture; dflash drafts a whole block in one forward; dspark adds a Markov head that looks at "
        "the token before, and a confidence head; dflash2 adds convolutions along the block and a selector that draws "
        "each token among few candidates, given the token before; eagle3 drafts token by token in one layer; mtp "
        "(multi-token prediction) likewise, in one layer of the target's own class behind its last",
    )
    init: str | None = Field(
        None,
        description="a drafter directory, or `bundled`, to start from; the shape then comes from it; or `native`: the "
        "multi-token-prediction head in the target's own checkpoint",
    )
    block_size: int = Field(
        8,
        ge=2,
        description="slots of a block, the anchor's included: block_size - 1 tokens are drafted; dspark drafts "
        "block_size, for its anchor slot predicts too",
    )
    layers: int | None = Field(None, ge=1, description="decoder layers of the drafter; default: 2, eagle3 1")
    target_layers: list[int] | None = Field(
        None, description="target layers whose output it reads, ascending; default: evenly spread"
    )
    taps: int | None = Field(
        None,
        ge=1,
        description="how many target layers, when target_layers is not given; default: as many as layers, eagle3 3",
    )
    mask_token: int | str | None = Field(
        None,
        description="unused special token for the drafted slots, or `learned` for a trained vector instead; "
        "default: chosen and recorded; learned where no token is unused",
    )
    draft_vocab: int | Literal["target"] | None = Field(
        None,
        description="eagle3: tokens of its own, trained readout, the most frequent of the training answers; `target` = "
        "borrow the target's readout; default: 32000, or all where the target has fewer",
    )
    intermediate_size: int | None = Field(None, ge=1, description="default: the target's")
    heads: int | None = Field(None, ge=1, description="attention heads; default: the target's")
    kv_heads: int | None = Field(None, ge=1, description="key/value heads; default: the target's")
    head_dim: int | None = Field(None, ge=2, description="default: the target's")
    served_by: Literal["vllm", "sglang"] | None = Field(
        None,
        description="mtp: train and decode the head as this engine computes it: vLLM leaves the first position's "
        "embedding out for DeepSeek and GLM-4 MoE, and hands GLM's rows on before the norm; default: as sglang",
    )
    markov: Literal["vanilla", "gated", "rnn", "none"] | None = Field(
        None,
        description="dspark: what the token before adds to the logits; gated: as the hidden row lets it through; rnn: "
        "with a state along the block; default: vanilla",
    )
    markov_rank: int | None = Field(None, ge=1, description="dspark: rank of what the Markov head adds; default: 256")
    confidence: bool | None = Field(
        None,
        description="dspark: a head that tells how likely each draft is to be accepted, so that unlikely ones need not "
        "be verified; default: true",
    )
    selector_rank: int | None = Field(
        None, ge=1, description="dflash2: width of the selector's codebooks; default: 256"
    )
    selector_top_k: int | None = Field(None, ge=1, description="dflash2: candidates a drafted token has; default: 16")
    conv_kernel_size: int | None = Field(
        None, ge=1, description="dflash2: slots that a convolution reads, its own included; default: 2"
    )
    conv_group_size: int | None = Field(
        None, ge=1, description="dflash2: channels that share a convolution's dynamic part; default: 16"
    )

    @property
    def may_have_confidence(self) -> bool:
        """Whether it has a confidence head, as far as the recipe says; where it starts from a folder, that decides."""
        return self.init is not None or (self.family == "dspark" and self.confidence is not False)

    @model_validator(mode="after")
    def _check_family(self) -> DrafterPart:
        if self.init is None and (why := why_strange(self.family, dict(self))):
            raise ValueError(why)
        if isinstance(self.draft_vocab, int) and self.draft_vocab < 1:
            raise ValueError(f"draft_vocab {self.draft_vocab} is no number of tokens; `target` borrows its readout")
        return self


class ObjectivePart(Part):
    """What is minimised, per drafted position k = 1..K counted from the block's start."""

    kind: Literal["ce", "forward_kl", "reverse_kl", "tv", "nla", "e2e_tv", "draft_opd"] = Field(
        "ce",
        description="ce: next-token cross-entropy; forward_kl: KL(p||q); reverse_kl: KL(q||p); "
        "tv: 1 - alpha, alpha = sum min(p, q); nla: -log alpha; e2e_tv: 1 - share of the block that is expected to be "
        "accepted, from the products of alpha along it; draft_opd: KL or ce on accepted and on rejected tokens",
    )
    temperature: float = Field(
        1.0,
        ge=0,
        description="temperature of p and q inside the loss; tv and e2e_tv: 0 = p is the target's argmax, q stays at 1",
    )
    decay: float = Field(
        4.0,
        gt=0,
        allow_inf_nan=True,
        description="weight exp(-(k-1)/decay) of ce, KL, tv, nla and of the ce beside e2e_tv; inf = none",
    )
    estimator: Literal["alpha_product", "accept_weighted"] = Field(
        "alpha_product",
        description="e2e_tv: how likely position k is reached: the product of the earlier alpha, or of the chances "
        "that the earlier tokens themselves are accepted",
    )
    ce_weight: float = Field(
        0.1, ge=0, description="tv, nla, e2e_tv: times the cross-entropy of the known labels, added; 0 = none"
    )
    confidence_weight: float | None = Field(
        None,
        ge=0,
        description="times the binary cross-entropy of the drafter's confidence in each token against its alpha, added "
        "to any kind; 0 = none; default: 1 where the drafter has a confidence head",
    )
    gamma: float = Field(0.8, gt=0, le=1, description="draft_opd: rejected weight gamma^(k-1); 1 = no decay")
    accepted: Literal["forward_kl", "reverse_kl", "ce"] = Field(
        "forward_kl", description="draft_opd: loss on accepted tokens"
    )
    rejected: Literal["forward_kl", "reverse_kl", "none"] = Field(
        "reverse_kl", description="draft_opd: loss on rejected tokens; none = corrected rollout only"
    )
    reduction: Literal["two_means", "pooled"] = Field(
        "two_means", description="draft_opd: two means 1:1, or one pooled weighted mean"
    )
    correction: bool = Field(
        False, description="draft_opd: count the correction token (first rejected slot) as accepted too"
    )
    first_rejected_only: bool = Field(False, description="draft_opd: leave out what follows the first rejected token")
    chunk: int = Field(
        512,
        ge=1,
        description="rows whose logits are held at a time (memory: chunk x vocabulary x 4 bytes, a few times)",
    )
    kernel: Literal["auto", "eager", "triton"] = Field(
        "auto",
        description="triton: loss and readout in one kernel that holds no logits (CUDA, bfloat16 or float32 readouts); "
        "eager: in chunks of rows; auto: the faster of the two on this machine, as measured",
    )

    @model_validator(mode="after")
    def _check_temperature(self) -> ObjectivePart:
        if self.temperature == 0 and self.kind not in ("tv", "e2e_tv"):
            raise ValueError(f"temperature 0 is for kind tv and e2e_tv; {self.kind} needs a temperature above 0")
        no_overflow(self.temperature)
        return self


class RolloutPart(Part):
    """Trunks rolled out now by speculative decoding with the current drafter (trunks: rollout)."""

    refresh_every: int = Field(100, ge=1, description="optimiser steps between rollouts")
    prompts: int | None = Field(None, ge=1, description="prompts per rollout; default: all training prompts")
    max_new_tokens: int | None = Field(None, ge=2, description="default: data.response.max_new_tokens")
    temperature: float = Field(0.0, ge=0, description="temperature of target and drafter while rolling out; 0 = greedy")
    rule: Literal["match", "ratio"] = Field(
        "match",
        description="verification: match = the draft is the argmax of q, kept where it equals the target's draw; "
        "ratio = drawn from q, kept with probability min(1, p/q)",
    )
    batch_size: int = Field(16, ge=1, description="prompts decoded at a time")
    teacher: Literal["store", "recompute"] = Field(
        "store", description="keep the target's rows from verification, or score anew"
    )


class BranchPart(Part):
    """Branches sampled from the current drafter (proposals: sampled), scored in one target forward."""

    temperature: float = Field(1.0, ge=0, description="the drafter's tokens are drawn at it; 0 = all greedy")
    _check = field_validator("temperature")(no_overflow)
    greedy_share: float = Field(0.0, ge=0, le=1, description="share of the branches that are the drafter's argmax")
    state: Literal["recompute", "keep"] = Field(
        "recompute",
        description="the trunk's state: fed again with its branches, or kept within feature_memory_gb and _disk_gb",
    )
    target_tokens: int | None = Field(
        None,
        ge=1,
        description="most tokens of one forward, all processes together; fewer anchors, at least one",
    )


class OptimiserPart(Part):
    """AdamW with a learning-rate schedule."""

    lr: float = Field(1e-3, gt=0, description="largest learning rate")
    beta1: float = Field(0.9, ge=0, lt=1, description="decay of the first moment")
    beta2: float = Field(0.95, ge=0, lt=1, description="decay of the second moment")
    weight_decay: float = Field(0.01, ge=0, description="decoupled weight decay; biases and norms have none")
    clip: float = Field(1.0, gt=0, description="largest gradient norm")
    schedule: Literal["cosine", "wsd", "constant"] = Field(
        "cosine",
        description="after the warm-up: cosine = half a cosine down to final; wsd = level, then a linear fall to it; "
        "constant = level",
    )
    warmup: float = Field(0.04, ge=0, lt=1, description="share of the steps with rising learning rate")
    decay_share: float = Field(0.3, ge=0, le=1, description="wsd: share of the steps with falling learning rate")
    final: float = Field(0.0, ge=0, le=1, description="cosine, wsd: where the learning rate ends, as a share of lr")


class StagePart(Part):
    """One row of the method table, trained for a number of steps or minutes."""

    name: str = Field(
        ..., pattern=r"^[A-Za-z0-9_.-]+$", description="names the stage in logs, checkpoints, overrides and `start`"
    )
    method: Literal["sft", "off-policy-kl", "overlap", "draft-opd", "specopd", "custom"] = Field(
        "custom", description="fills the cells below; a cell that you give wins"
    )
    start: str = Field("previous", description="`previous`, `init`, or the name of an earlier stage to continue from")
    trunks: Literal["fixed", "rollout"] = Field(
        "fixed", description="fixed = prompt and answer as prepared; rollout = decoded anew with the current drafter"
    )
    anchors: Literal["random", "rollout", "errors", "alpha", "all"] = Field(
        "random",
        description="where blocks begin: random; rollout = where verification really began one; errors = where greedy "
        "drafting fails soonest; alpha = drawn with weight 1 - alpha; all = everywhere. errors and alpha choose among "
        "four times as many random ones",
    )
    proposals: Source | dict[Source, Annotated[float, Field(gt=0)]] = Field(
        "trunk",
        description="trunk = the trunk's own next tokens; sampled = drawn from the current drafter, all anchors at "
        "once; recorded = drafted in the rollout, rejected tokens kept; redraft = the current drafter's argmax. Or a "
        "mixture with weights, e.g. {trunk: 0.5, sampled: 1}: each has its own mean, at the same anchors",
    )
    branch: BranchPart = Field(default_factory=BranchPart)
    objective: ObjectivePart = Field(default_factory=ObjectivePart)
    rollout: RolloutPart = Field(default_factory=RolloutPart)
    optimiser: OptimiserPart = Field(default_factory=OptimiserPart)
    steps: int | None = Field(None, ge=1, description="optimiser steps (give steps or minutes)")
    minutes: float | None = Field(None, gt=0, description="turned into steps once, from measured speed, and then kept")
    batch_size: int = Field(4, ge=1, description="sequences in one forward")
    accumulate: int = Field(1, ge=1, description="forwards per optimiser step")
    anchors_per_sequence: int = Field(
        16, ge=1, description="blocks trained per sequence and forward (anchors: all ignores it)"
    )
    evaluations: int = Field(5, ge=1, description="validation walks in this stage, evenly spread, the last at its end")
    stop: StopPart = Field(default_factory=StopPart)
    checkpoint_every: int | None = Field(
        None, ge=1, description="steps between checkpoints; default: at every validation"
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_cells(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        method = given.get("method", "custom")
        return merged(METHODS.get(method, {}) if isinstance(method, str) else {}, given)

    @field_validator("proposals", mode="before")
    @classmethod
    def _check_mixture(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        known = get_args(Source)
        if not given:
            raise ValueError(f"a mixture needs at least one of {', '.join(known)}")
        for source, weight in given.items():
            if source not in known:
                near = get_close_matches(str(source), known, 1)
                raise ValueError(f"{source!r} is no source of proposals; did you mean {near[0] if near else known}?")
            number = isinstance(weight, int | float) and not isinstance(weight, bool)
            if not number or not 0 < weight < math.inf:
                raise ValueError(f"the weight of {source} is {weight!r}, and must be a number above 0; or leave it out")
        return given

    @model_validator(mode="after")
    def _check_cells(self) -> StagePart:
        if self.anchors == "rollout" and self.trunks != "rollout":
            raise ValueError("anchors: rollout are recorded while rolling out, so they need trunks: rollout")
        if "recorded" in self.mixture and self.anchors != "rollout":
            raise ValueError("proposals: recorded exist only at recorded anchors, so they need anchors: rollout")
        if self.objective.kind == "draft_opd" and set(self.mixture) == {"trunk"}:
            raise ValueError(
                "objective draft_opd needs proposals: sampled, recorded or redraft: the trunk has no rejected tokens"
            )
        if self.objective.correction and self.objective.accepted == "ce" and "sampled" in self.mixture:
            raise ValueError("correction with accepted: ce needs a correction token, and a sampled branch has none")
        return self

    @property
    def mixture(self) -> dict[Source, float]:
        """The proposals and their weights, which sum to 1."""
        given: dict[Source, float] = self.proposals if isinstance(self.proposals, dict) else {self.proposals: 1.0}
        total = sum(given.values())
        return {source: weight / total for source, weight in given.items()}


class EvaluatePart(Part):
    """Held-out evaluation."""

    max_new_tokens: int | None = Field(None, ge=2, description="default: data.response.max_new_tokens")
    decode_prompts: int = Field(12, ge=0, description="test prompts decoded for real, first and last drafter (speed)")
    batch_size: int = Field(16, ge=1, description="trunks walked, or prompts decoded for the audit, at a time")
    audit_prompts: int = Field(6, ge=0, description="test prompts checked for losslessness in float32")


class Recipe(Part):
    """A whole run."""

    schema_version: int = Field(SCHEMA, alias="schema", description="version of this format; this draftloop reads 1")
    name: str = Field("run", pattern=r"^[A-Za-z0-9_.-]+$", description="names the run")
    out: str | None = Field(None, description="run directory; default: runs/NAME")
    seed: int = Field(0, ge=0, description="every random draw is keyed by it: same seed, same result")
    threads: int | None = Field(None, ge=1, description="CPU threads, at most four a core; default: one a core")
    precision: Literal["auto", "bfloat16", "float32"] = Field(
        "auto", description="compute type in training; weights stay float32. auto = bfloat16"
    )
    compile_drafter: bool = Field(
        False,
        description="compile the layers of a block-parallel drafter for training: fewer kernels a step, after a "
        "compilation of about a minute; the same losses but for rounding",
    )
    feature_memory_gb: float = Field(
        4.0, gt=0, description="budget for trunk features kept in memory; beyond it they go to disk, or are recomputed"
    )
    feature_disk_gb: float = Field(
        0.0, ge=0, description="budget of all processes for those beyond it, in the run directory while it is trained"
    )
    target: TargetPart = Field(default_factory=TargetPart)
    data: DataPart = Field(default_factory=DataPart)
    drafter: DrafterPart = Field(default_factory=DrafterPart)
    stages: list[StagePart] = Field(default_factory=list)
    evaluate: EvaluatePart = Field(default_factory=EvaluatePart)

    model_config = ConfigDict(populate_by_name=True)

    @model_validator(mode="after")
    def _check_stages(self) -> Recipe:
        seen: list[str] = []
        for stage in self.stages:
            if stage.name in seen or stage.name in ("init", "previous", "untrained", "ngram"):
                raise ValueError(f"stage name {stage.name!r} is taken")
            if stage.start not in ("previous", "init", *seen):
                raise ValueError(f"stage {stage.name!r} starts from {stage.start!r}, which is no earlier stage")
            if stage.objective.confidence_weight and not self.drafter.may_have_confidence:
                raise ValueError(
                    f"stage {stage.name!r} has a confidence_weight, and the drafter has no confidence head; that needs"
                    " drafter.family: dspark, and not confidence: false"
                )
            seen.append(stage.name)
        part = self.drafter
        if self.compile_drafter and part.init is None and part.family not in COMPILED:
            raise ValueError(
                f"compile_drafter means nothing for drafter.family {part.family}, whose layers are called slot by slot;"
                f" it is for {' and '.join(COMPILED)}"
            )
        if self.schema_version != SCHEMA:
            raise ValueError(f"schema {self.schema_version} is not {SCHEMA}, the one that this version reads")
        return self
