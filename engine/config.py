"""RunConfig: what one run is. Attrs classes, filled from TOML by ``engine.config_file``.

Every key has a type, a default and one line of meaning (``help``); ``uniagent config`` prints them from here. Counts
are global, durations end in ``_s``, sizes in ``_mib``. A key that nothing reads does not exist. Combinations that
cannot work are refused in ``check``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from attrs import field, fields, frozen


def key(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    registry: str | None = None,
    path: str | None = None,
) -> Any:
    """A config key: its default, its meaning, and what is allowed: the choices, the names of a kind in the registry, a
    range. ``path`` says what a text stands for on disk: ``file``, ``samples`` (a file or NAME/SPLIT), ``model`` or
    ``new`` (a file that need not exist)."""
    metadata = {
        "help": help,
        "choices": choices,
        "at_least": at_least,
        "at_most": at_most,
        "registry": registry,
        "path": path,
    }
    return field(factory=default, metadata=metadata) if callable(default) else field(default=default, metadata=metadata)


@frozen
class Run:
    steps: int = key(100, "optimizer steps (batches) to train", at_least=0)
    seed: int = key(0, "seed of every generator of the run", at_least=0)
    threads: int = key(1, "CPU threads torch may use", at_least=1)
    drain_s: float = key(
        20.0, "after the first Ctrl-C or SIGTERM, how long running sessions may take to end", at_least=0
    )


@frozen
class Model:
    path: str = key("builtin:tiny-shell", "a Hugging Face folder, or builtin:NAME", path="model")
    dtype: str = key("auto", "weights and activations", choices=("auto", "float32", "bfloat16"))
    device: str = key("auto", "where the model lives", choices=("auto", "cpu", "cuda"))
    parser: str = key(
        "auto",
        "parser of the model's tool calls and reasoning; auto: from the chat template",
        choices=("auto",),
        registry="parsers",
    )


@frozen
class Engine:
    name: str = key("transformers", "inference engine", registry="engines")
    slots: int = key(64, "requests decoded at once", at_least=1)
    context: int = key(512, "longest prompt + generation, in tokens", at_least=16)
    prefill_tokens: int = key(4096, "prompt tokens processed in one step, padding included", at_least=16)
    gather_ms: float = key(
        0.0, "while less than half the slots are busy, a step waits this long for more requests to join", at_least=0
    )
    kv: str = key("recompute", "KV of running requests on a weight update", choices=("recompute", "keep"))
    options: Mapping[str, Any] = key(dict, "passed to the engine as they are")


@frozen
class Gateway:
    host: str = key("127.0.0.1", "address the gateway listens on")
    port: int = key(0, "port; 0 takes a free one", at_least=0, at_most=65535)
    max_body_mib: int = key(64, "largest request body", at_least=1)
    header_timeout_s: float = key(10.0, "to receive the head of a request", at_least=0.1)
    idle_timeout_s: float = key(600.0, "a kept-alive connection without a request is closed", at_least=1)
    max_sessions: int = key(20000, "live sessions on this node", at_least=1)
    rewind: str = key("split", "accepted actions that a harness goes back behind", choices=("split", "discard"))
    refused: str = key("discard", "calls that could not be run and were dropped", choices=("discard", "train"))
    side_call: str = key("discard", "title and summary calls beside the conversation", choices=("discard", "train"))
    edited: str = key("train", "sampled tokens that came back edited", choices=("train", "context"))


@frozen
class Rollout:
    mode: str = key(
        "sync",
        "sync: roll out, train, sync weights, in turn; colocated: sessions go on while the same device trains; "
        "separate: a training mesh, and rollout nodes (placement)",
        choices=("sync", "colocated", "separate"),
    )
    groups_per_step: int = key(16, "groups in a training batch", at_least=1)
    group_size: int = key(8, "episodes of one sample", at_least=1)
    max_sessions: int = key(256, "sessions running at once, whole groups first", at_least=1)
    staleness_threshold: float = key(
        0.0, "groups under way beyond one sync's batches, as a share of them (asynchronous modes)", at_least=0
    )
    sync_every: int = key(1, "optimizer steps between weight syncs", at_least=1)
    max_staleness: int = key(
        0, "oldest trained token, in policy versions; older ones are masked, their session still counts", at_least=0
    )
    partial_rollout: bool = key(
        True, "generations go on across a weight sync; false: a sync waits until running generations end"
    )
    on_no_signal: str = key(
        "shrink",
        "a group whose outcomes are all equal: shrink leaves its place empty, refill rolls out another",
        choices=("shrink", "refill"),
    )
    memory_share: float = key(
        0.0,
        "no group starts while running sessions are expected to hold more than this share of the engines' KV; 0: no "
        "such limit",
        at_least=0,
    )
    session_timeout_s: float = key(300.0, "wall-clock of one session; then it ends as an agent failure", at_least=1)
    head_url: str = key(
        "", "where the head of a separate run is reached, http://HOST:PORT; empty: MASTER_ADDR and MASTER_PORT + 1"
    )
    bind: str = key("", "address the head listens on; empty: loopback only")
    lease_s: float = key(
        30.0, "a rollout node that is silent for so long is lost: its sessions are handed out again", at_least=1
    )


@frozen
class Placement:
    """Who does what in a separate run."""

    train_ranks: int = key(1, "ranks of the torchrun job that train; the others roll out", at_least=1)
    joining: bool = key(
        False,
        "rollout nodes from jobs of their own may join (uniagent rollout --join): weights are kept ready for them",
    )


LOSSES = ("grpo", "dapo", "dr_grpo", "gspo", "cispo", "rloo", "decoupled_ppo")
ADVANTAGES = ("auto", "mean", "mean_std", "rloo", "maxrl")
AGGREGATIONS = ("auto", "token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm")


@frozen
class Learner:
    loss: str = key("dapo", "policy loss; sets the defaults of what is auto or 0 below", choices=LOSSES)
    advantage: str = key("auto", "group baseline", choices=ADVANTAGES)
    aggregation: str = key("auto", "how token losses are averaged; a sequence is a session", choices=AGGREGATIONS)
    norm_tokens: int = key(1024, "constant divisor of seq_mean_token_sum_norm", at_least=1)
    clip_low: float = key(0.0, "the ratio is clipped below 1 - clip_low; 0: the loss's own", at_least=0)
    clip_high: float = key(0.0, "the ratio is clipped above 1 + clip_high; 0: the loss's own", at_least=0)
    dual_clip: float = key(0.0, "bound on the loss of negative advantages, in |advantage|; 0: none", at_least=0)
    proximal: str = key(
        "policy",
        "the ratio's base: the policy at the batch's start, or that which sampled",
        choices=("policy", "behaviour"),
    )
    correction: str = key(
        "tis",
        "weight of tokens that another policy sampled, where proximal = policy",
        choices=("none", "tis", "tis_sequence", "icepop"),
    )
    correction_low: float = key(0.5, "icepop: weights below are masked", at_least=0)
    correction_high: float = key(0.0, "tis: cap of the weight; icepop: weights above are masked; 0: own", at_least=0)
    geometric_low: float = key(0.0, "sessions whose geometric mean weight is below are masked; 0: none", at_least=0)
    geometric_high: float = key(0.0, "sessions whose geometric mean weight is above are masked; 0: none", at_least=0)
    kl: str = key("k3", "estimator of the KL to the reference model", choices=("k1", "k2", "k3"))
    kl_coef: float = key(0.0, "weight of that KL in the loss; 0: no reference model", at_least=0)
    entropy_coef: float = key(0.0, "weight of the entropy bonus", at_least=0)
    overlong_limit: int = key(0, "sampled tokens of a session at which the length penalty is -1; 0: none", at_least=0)
    overlong_buffer: int = key(256, "tokens over which that penalty grows", at_least=1)
    lr: float = key(5e-4, "peak learning rate", at_least=0)
    schedule: str = key("constant", "after the warm-up", choices=("constant", "linear", "cosine"))
    warmup_steps: int = key(5, "linear warm-up of the learning rate", at_least=0)
    betas: tuple[float, float] = key((0.9, 0.95), "AdamW betas")
    weight_decay: float = key(0.0, "AdamW weight decay", at_least=0)
    max_grad_norm: float = key(1.0, "gradient clipping; 0: none", at_least=0)
    minibatches: int = key(1, "optimizer steps a batch is split into", at_least=1)
    micro_tokens: int = key(4096, "tokens of one forward and backward", at_least=16)
    prefix_tree: bool = key(True, "compute shared prefixes once")
    recompute: bool = key(False, "run layers again in the backward instead of keeping their activations")
    precision: str = key(
        "auto",
        "matrix products; weights and optimizer are float32; auto: bfloat16 on an accelerator",
        choices=("auto", "float32", "bfloat16"),
    )
    lora_rank: int = key(0, "train low-rank adapters of this rank (needs the extra lora); 0: all weights", at_least=0)
    lora_alpha: float = key(32.0, "the adapters are scaled by lora_alpha / lora_rank", at_least=0)
    context_parallel: int = key(1, "ranks that share one row, for sequences beyond one rank's memory", at_least=1)


@frozen
class Checkpoint:
    every: int = key(0, "steps between checkpoints; 0: only the last", at_least=0)
    keep: int = key(3, "checkpoints kept, the newest", at_least=1)


@frozen
class Tasks:
    file: str = key("", "Task Config (TOML or YAML), relative to this file", path="file")
    data: str = key(
        "", "samples: a JSONL file relative to this file, or NAME/SPLIT of a registered dataset", path="samples"
    )
    options: Mapping[str, Any] = key(dict, "passed to a registered dataset")


@frozen
class Sandbox:
    options: Mapping[str, Any] = key(
        dict, "per provider, merged under every task's sandbox section: [sandbox.options.local]"
    )


@frozen
class Eval:
    data: str = key("", "held-out samples, as tasks.data; empty: no evaluation", path="samples")
    n: int = key(448, "samples evaluated", at_least=1)
    seed: int = key(777, "which held-out samples", at_least=0)
    every: int = key(0, "steps between evaluations; 0: before and after only", at_least=0)
    greedy: bool = key(True, "evaluate greedily too, beside sampling")
    temperature: float = key(1.0, "of the sampled evaluation", at_least=0)
    top_p: float = key(1.0, "of the sampled evaluation", at_least=0.0, at_most=1.0)
    top_k: int = key(0, "of the sampled evaluation; 0: off", at_least=0)
    samples: int = key(1, "sampled episodes of each held-out sample; pass@k is given for k up to this", at_least=1)


ALARMS = ("entropy", "length", "malformed", "mismatch")


@frozen
class Alarms:
    """A limit of 0 switches an alarm off."""

    patience: int = key(3, "steps in a row beyond a limit before its alarm rings", at_least=1)
    stop: tuple[str, ...] = key((), f"alarms that end the run, saved, instead of warning: {', '.join(ALARMS)}")
    entropy_below: float = key(0.001, "entropy: of the policy on trained tokens, in nats", at_least=0)
    cut_above: float = key(0.5, "length: share of answers that ended at their token limit", at_least=0, at_most=1)
    malformed_above: float = key(
        0.5, "malformed: share of answers whose tool calls could not be parsed", at_least=0, at_most=1
    )
    mismatch_kl_above: float = key(0.1, "mismatch: KL of the sampling policy to the trained one, in nats", at_least=0)


@frozen
class Curriculum:
    strategy: str = key("learnability", "which samples come next", registry="strategies")
    family: str = key("metadata.family", "where a sample names its family, as a dotted path; else its task is it")
    band: tuple[float, float] = key(
        (0.1, 0.9), "pass rates that the strategy band draws, and difficulty keeps", at_least=0, at_most=1
    )
    quotas: Mapping[str, Any] = key(dict, "share of each family in the strategy mixture; others share what is left")
    half_life: float = key(10.0, "policy versions after which a trial counts half", at_least=0.1)
    exclude_trials: int = key(
        8, "samples whose last this many trials all passed or all failed are left out; 0: none", at_least=0
    )
    reprobe: float = key(
        0.05, "part of the draws that goes to all samples alike, those left out too", at_least=0.001, at_most=1
    )
    history: str = key("", "file of trials, shared by runs; empty: trials.db in the run folder", path="new")
    warm_start: bool = key(True, "estimates start from the trials in curriculum.history by the same model and template")


@frozen
class Trackers:
    names: tuple[str, ...] = key((), "trackers besides the run folder's metrics.jsonl", registry="trackers")


@frozen
class Simulate:
    """Only ``uniagent simulate`` reads it. Medians are of lognormals; a sigma is that of the logarithm."""

    mode: str = key(
        "",
        "rollout.mode of the simulated run, or a published one to compare with; empty: rollout.mode",
        choices=("", "sync", "one_step_off", "fully_async", "colocated", "separate"),
    )
    accelerators: int = key(64, "of the simulated machine", at_least=1)
    train_accelerators: int = key(16, "of them for training where rollout has its own", at_least=1)
    replica_accelerators: int = key(0, "that make one replica of the policy; 0: as in costs", at_least=0)
    costs: str = key("", "JSON file of what things cost (--calibrate prints one); empty: a 30B model", path="file")
    router: str = key(
        "cache_aware",
        "how requests find a replica",
        choices=(
            "cache_aware",
            "sticky_hash",
            "sticky_least_loaded",
            "least_tokens",
            "least_requests",
            "round_robin",
        ),
    )
    engine_share: float = key(0.5, "of a device for its engine while it trains (colocated)", at_least=0.0, at_most=0.95)
    prompt_tokens: int = key(2000, "of a sample, shared by its group", at_least=1)
    turns: float = key(15.0, "answers of a session, median", at_least=1)
    turns_sigma: float = key(0.7, "of the turns", at_least=0)
    turns_min: int = key(5, "fewest turns", at_least=1)
    turns_max: int = key(100, "most turns", at_least=1)
    answer_tokens: float = key(150.0, "of an answer, median", at_least=1)
    answer_sigma: float = key(0.8, "of an answer's tokens", at_least=0)
    tool_tokens: float = key(200.0, "of what a tool says, median", at_least=1)
    tool_s: float = key(2.0, "a tool takes, median", at_least=0)
    tool_sigma: float = key(1.2, "of a tool's time", at_least=0)
    drift_turns: float = key(1.0, "factor by which turns grow over the run", at_least=0.1)
    drift_tokens: float = key(1.0, "factor by which the tokens of a turn grow over the run", at_least=0.1)
    context: int = key(128000, "longest session, in tokens", at_least=16)


@frozen
class RunConfig:
    run: Run = field(factory=Run)
    model: Model = field(factory=Model)
    engine: Engine = field(factory=Engine)
    gateway: Gateway = field(factory=Gateway)
    rollout: Rollout = field(factory=Rollout)
    placement: Placement = field(factory=Placement)
    learner: Learner = field(factory=Learner)
    checkpoint: Checkpoint = field(factory=Checkpoint)
    tasks: Tasks = field(factory=Tasks)
    sandbox: Sandbox = field(factory=Sandbox)
    eval: Eval = field(factory=Eval)
    alarms: Alarms = field(factory=Alarms)
    curriculum: Curriculum = field(factory=Curriculum)
    trackers: Trackers = field(factory=Trackers)
    simulate: Simulate = field(factory=Simulate)


def check(config: RunConfig) -> list[tuple[str, Any, str]]:
    """Bad combinations, each as (key, value, what to do)."""
    problems: list[tuple[str, Any, str]] = []
    r = config.rollout
    if r.max_sessions < r.group_size:
        problems.append(
            (
                "rollout.max_sessions",
                r.max_sessions,
                f"must be at least rollout.group_size ({r.group_size}): groups run whole",
            )
        )
    if r.mode == "sync":
        for name in ("staleness_threshold", "max_staleness"):
            if getattr(r, name):
                problems.append(
                    (f"rollout.{name}", getattr(r, name), "sync has no stale tokens: use 0 or mode colocated")
                )
    most = math.ceil((r.staleness_threshold + 1) * r.sync_every - 1e-9) - 1
    if r.mode != "sync" and most > 0 and r.max_staleness == 0:
        problems.append(
            (
                "rollout.max_staleness",
                0,
                "masks all that was sampled before the latest sync: use 1 or more, or staleness_threshold = 0 and "
                "sync_every = 1",
            )
        )
    if r.mode != "separate":
        for name, default in (("train_ranks", 1), ("joining", False)):
            if (value := getattr(config.placement, name)) != default:
                problems.append((f"placement.{name}", value, f"places a separate run; rollout.mode is {r.mode}"))
    if r.mode == "separate" and not r.partial_rollout:
        problems.append(
            ("rollout.partial_rollout", False, "generations of a separate run go on across a sync: use true")
        )
    if r.head_url and not re.fullmatch(r"http://[^/\s]+:\d+", r.head_url):
        problems.append(("rollout.head_url", r.head_url, "write http://HOST:PORT"))
    if r.mode == "sync" and r.sync_every > 1:
        problems.append(("rollout.sync_every", r.sync_every, "sync trains on what the newest weights sampled: use 1"))
    if r.group_size == 1:
        problems.append(("rollout.group_size", 1, "a group of one has no baseline: use 2 or more"))
    learner = config.learner
    if learner.proximal == "behaviour" and (learner.loss == "decoupled_ppo" or learner.geometric_high):
        problems.append(("learner.proximal", "behaviour", "leaves nothing to correct: use policy"))
    for name in config.alarms.stop:
        if name not in ALARMS:
            problems.append(("alarms.stop", name, f"there is no such alarm: {', '.join(ALARMS)}"))
    if bool(learner.geometric_low) != bool(learner.geometric_high):
        problems.append(
            ("learner.geometric_low", learner.geometric_low, "needs learner.geometric_high too, and it this")
        )
    if config.curriculum.band[0] > config.curriculum.band[1]:
        problems.append(("curriculum.band", list(config.curriculum.band), "is [lowest, highest]"))
    return problems


def sections() -> list[str]:
    return [f.name for f in fields(RunConfig)]
