"""The keys of a configuration: what each takes, and what it is when left out.

What a key takes is said once, in its type; from that come the check, and the words of an error
(explain.py). What several keys must agree on is in checks.py.
"""

from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from s2s_lib.cluster import PRESETS, Cluster, Link, preset
from s2s_lib.strategies.pipeline.actions import Schedule
from s2s_lib.strategies.pipeline.schedule import BUILDERS
from s2s_lib.training.checks import MOST_MICRO_BATCHES


def whole(low, high, null=False):
    words = f"a whole number from {low} to {high}" + (", or null" if null else "")
    return Annotated[int | None if null else int, Field(ge=low, le=high, description=words)]


def number(low, high):
    words = f"a number from {low} to {high}"
    return Annotated[float, Field(ge=low, le=high, description=words)]


def share(words="a number of at least 0 and below 1", **low):
    return Annotated[float, Field(lt=1, description=words, **low)]


def choice(*names):
    words = f"one of {', '.join(names)}" if len(names) > 2 else " or ".join(names)
    return Annotated[Literal[names], Field(description=words)]


YesNo = Annotated[bool, Field(description="true or false")]
PathOrNull = Annotated[str | None, Field(min_length=1, description="a path, or null")]


class Keys(BaseModel):
    """Some keys of a configuration. Nothing is converted, nothing unknown is taken."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Model(Keys):
    """The GPT (course/model.py): a size, and whatever should differ from it."""

    size: choice("tiny", "small") = "tiny"
    layers: whole(1, 1000)
    hidden: whole(2, 100_000)
    heads: whole(1, 1000)
    kv_heads: whole(1, 1000, null=True)
    vocab: whole(1, 1_000_000)
    seq: whole(1, 1_000_000)
    mlp_hidden: whole(1, 1_000_000, null=True)
    tied: YesNo
    rope_theta: number(1, 1_000_000_000)
    dropout: share(ge=0)

    @model_validator(mode="before")
    @classmethod
    def of_size(cls, given):
        """What is not given is that of the size."""
        from dataclasses import asdict

        from s2s_lib.course.model import GPTConfig

        if not isinstance(given, dict):
            return given
        size = GPTConfig.small if given.get("size") == "small" else GPTConfig.tiny
        return asdict(size()) | given


class Data(Keys):
    """A file or folder of text; null is the text of Python's standard library."""

    path: PathOrNull = None
    hold_out: share("a share above 0 and below 1", gt=0) = 0.1


def is_share_pair(betas):
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError
    return betas


class Optimizer(Keys):
    """`betas` and `eps` are AdamW's, `momentum` is SGD's; `clip` bounds the gradient's norm."""

    name: choice("adamw", "sgd") = "adamw"
    lr: number(0, 100) = 1e-3
    betas: Annotated[
        tuple[float, ...],
        AfterValidator(is_share_pair),
        Field(description="two numbers of at least 0 and below 1, as in [0.9, 0.95]"),
    ] = (0.9, 0.95)
    eps: number(0, 1) = 1e-8
    weight_decay: number(0, 100) = 0.1
    momentum: share(ge=0) = 0.9
    clip: Annotated[
        float | None,
        Field(gt=0, allow_inf_nan=False, description="a number above 0, or null not to clip"),
    ] = 1.0


class LrSchedule(Keys):
    """A rise over `warmup_steps`, then down to the share `final` of the rate, or constant."""

    name: choice("constant", "cosine", "linear") = "constant"
    warmup_steps: whole(0, 1_000_000_000) = 0
    final: number(0, 1) = 0.1


class Checkpoint(Keys):
    """One `every` so many steps, 0 only at the end; `start_from` is a plain state dict."""

    every: whole(0, 1_000_000_000) = 0
    keep: whole(1, 1000) = 2
    background: YesNo = False
    start_from: PathOrNull = None


class Log(Keys):
    """A line `every` so many steps."""

    every: whole(1, 1_000_000_000) = 1


class Diloco(Keys):
    """Islands that each train by themselves, and talk once in `sync_every` steps (DiLoCo)."""

    islands: whole(1, 10_000)
    sync_every: whole(1, 1_000_000) = 50
    outer_lr: Annotated[float, Field(gt=0, le=100, description="a number above 0, at most 100")] = (
        0.7
    )
    outer_momentum: share(ge=0) = 0.9
    nesterov: YesNo = True
    fragments: whole(1, 1000) = 1
    delay: whole(0, 1_000_000) = 0
    mixing: share(ge=0) = 0.0
    bits: Annotated[Literal[4, 8] | None, Field(description="4, 8, or null for full numbers")] = (
        None
    )
    error_feedback: YesNo = False
    moments: choice("keep", "average", "reset") = "keep"
    gossip: YesNo = False


class LinkKeys(Keys):
    """A Link (cluster.py)."""

    gbit_s: Annotated[
        float,
        Field(gt=0, le=1e6, description="Gbit/s above 0, at most 1000000"),
    ]
    latency_us: number(0, 10_000_000) = 0.0


LINK = Field(description="keys of its own, as in {gbit_s: 10, latency_us: 50}, or null")


class ClusterKeys(Keys):
    """A Cluster (cluster.py); a link that is left out is not slowed."""

    nodes: whole(1, 10_000)
    gpus_per_node: whole(1, 10_000)
    intra: Annotated[LinkKeys | None, LINK] = None
    inter: Annotated[LinkKeys | None, LINK] = None


PresetOrKeys = Annotated[
    Annotated[choice(*PRESETS), Tag("name")] | Annotated[ClusterKeys, Tag("keys")],
    Discriminator(lambda given: "name" if isinstance(given, str) else "keys"),
]


def is_order(axes):
    if sorted(axes) != ["dp", "pp", "tp"]:
        raise ValueError
    return axes


class Config(Keys):
    """A configuration with everything that was left out; `load_config` makes one.

    `model_dump(mode="json")` is plain values, which written as YAML load as an equal Config.
    """

    tensor_parallel_size: whole(1, 10_000) = 1
    pipeline_parallel_size: whole(1, 1000) = 1
    data_parallel_size: whole(1, 10_000) = 1
    # Outermost first: the ranks of the last axis are neighbours.
    mesh_order: Annotated[
        tuple[str, ...],
        AfterValidator(is_order),
        Field(description="dp, pp and tp in any order, the outermost first, as in [dp, pp, tp]"),
    ] = ("dp", "pp", "tp")
    zero_stage: whole(0, 3) = 0
    # ZeRO inside groups of so many data-parallel ranks, and replicas between the groups.
    hybrid_shard_size: whole(1, 10_000, null=True) = None
    sequence_parallel: YesNo = False
    pipeline_schedule: choice("gpipe", "one_f_one_b", "interleaved", "zb_h1", "zbv") = "one_f_one_b"
    stages_per_rank: whole(1, 100, null=True) = None
    # In sequences: global_batch is the product of the two, which are of one replica, and of
    # data_parallel_size and diloco.islands. What is left out follows from the others
    # (checks.with_batch).
    global_batch: whole(1, 1_000_000, null=True) = None
    micro_batch_size: whole(1, 1_000_000, null=True) = None
    gradient_accumulation: whole(1, MOST_MICRO_BATCHES, null=True) = None
    steps: whole(1, 1_000_000_000) = 20
    seed: whole(0, 2**32 - 1) = 0
    # bfloat16 is mixed: what the optimizer steps is float32.
    precision: choice("float64", "float32", "bfloat16") = "float32"
    activation_checkpointing: YesNo = False
    model: Model = Field(default_factory=lambda: Model.model_validate({}))
    data: Data = Data()
    optimizer: Optimizer = Optimizer()
    lr_schedule: LrSchedule = LrSchedule()
    checkpoint: Checkpoint = Checkpoint()
    diloco: Annotated[
        Diloco | None,
        Field(description="keys of its own, as in {islands: 2, sync_every: 50}, or null"),
    ] = None
    # Links to emulate: the name of a preset, or counts and links.
    cluster: Annotated[
        PresetOrKeys | None,
        Field(
            description=f"a preset ({', '.join(PRESETS)}), or keys of its own, as in "
            "{nodes: 2, gpus_per_node: 4}"
        ),
    ] = None
    log: Log = Log()
    output: Annotated[str, Field(min_length=1, description="the path of a folder")]

    @property
    def ranks(self) -> int:
        sizes = self.pipeline_parallel_size * self.tensor_parallel_size
        return self.islands * self.data_parallel_size * sizes

    @property
    def islands(self) -> int:
        """The ranks of the sizes together, so many times."""
        return self.diloco.islands if self.diloco else 1

    @property
    def replicas(self) -> int:
        """Of the model, in all islands."""
        return self.islands * self.data_parallel_size

    @property
    def micro_batches(self) -> int:
        """Of one replica in a step."""
        return self.gradient_accumulation

    @property
    def stages(self) -> int:
        """Of the pipeline, over all its ranks."""
        return self.pipeline_parallel_size * self.stages_per_rank

    def gpt(self):
        """The GPTConfig of the model; ValueError where its sizes do not fit together."""
        from s2s_lib.course.model import GPTConfig

        return GPTConfig(**self.model.model_dump(exclude={"size"}))

    def schedule(self) -> Schedule:
        """The pipeline's schedule; ValueError for micro-batches that it does not take."""
        if self.gradient_accumulation is None:
            raise ValueError(
                "gradient_accumulation is not given, and only load_config works out what follows "
                "from other keys: make a Config with it"
            )
        counts = [self.pipeline_parallel_size, self.micro_batches]
        if self.pipeline_schedule == "interleaved":
            counts.append(self.stages_per_rank)
        return BUILDERS[self.pipeline_schedule](*counts)

    def cluster_object(self) -> Cluster | None:
        """The Cluster whose links are emulated."""
        if self.cluster is None or isinstance(self.cluster, str):
            return self.cluster and preset(self.cluster)
        keys = self.cluster
        links = {
            name: link and Link(link.gbit_s, link.latency_us)
            for name, link in (("intra", keys.intra), ("inter", keys.inter))
        }
        return Cluster(keys.nodes, keys.gpus_per_node, **links)
