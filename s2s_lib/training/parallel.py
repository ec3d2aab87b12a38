"""All strategies at once: a mesh of ranks, and each strategy's own verb along its axis.

    who holds what    the model is cut three times: into stages (pp), each stage into parts (tp),
                      and each part, with ZeRO, into shards over its replicas (dp)
    who sends what    each strategy what it sends alone, inside its own groups

    stage  = split(model, stages)[own]                 pipeline parallelism: whole layers
    part   = tensor_parallel(stage, mesh["tp"], plan)  a part of each layer
    copy   = DDP(part, mesh["dp"]), or ZeRO(...)       one of dp copies, or a shard of it
    Pipeline([copy], mesh["pp"], schedule, loss)       one step of all

In this order, from the inside out: a stage is whole until it is cut into parts, and what replicas
average is a part. Nothing is implemented here; a wrong combination is refused by the strategy that
would suffer. (Narayanan et al., arXiv:2104.04473.)
"""

import functools

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from s2s_lib.collectives.functions import all_reduce, broadcast
from s2s_lib.collectives.pieces import even_cuts
from s2s_lib.course.model import next_token_loss
from s2s_lib.course.plans import GPT_PLAN
from s2s_lib.ranks.group import Group, Mesh
from s2s_lib.strategies.ddp import DDP
from s2s_lib.strategies.pipeline.partition.materialize import materialize
from s2s_lib.strategies.pipeline.partition.split import split
from s2s_lib.strategies.pipeline.run import Pipeline
from s2s_lib.strategies.tensor.apply import tensor_parallel
from s2s_lib.strategies.tensor.inside import comes_from_column
from s2s_lib.strategies.tensor.loss import vocab_parallel_cross_entropy
from s2s_lib.strategies.tensor.plan import Vocab, match, matches
from s2s_lib.strategies.unit import repeated_blocks
from s2s_lib.strategies.zero import ZeRO
from s2s_lib.training.config import Config
from s2s_lib.training.dropout import Places, place_dropout

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.float32}


def parallelize(model: nn.Module, config: Config, world: Group, plan: dict = GPT_PLAN):
    """`model`, whole and the same on every rank, as this rank's part of a `Parallel`, which takes
    it over: its layers are cut, and its dropout is one that no layout changes (dropout.py).

    On the meta device only this rank's stages are drawn, from `config.seed`, as construction after
    `torch.manual_seed` draws them: the result does not depend on the layout. `plan` says how
    layers are cut (tensor/plan.py). It may be any model that takes tokens and gives logits:
    `config.model` describes the command's GPT, and is not looked at here. ValueError, on all ranks,
    for what does not fit.
    """
    return Parallel(model, config, world, plan)


class Parallel(nn.Module):
    """This rank's part of a model that is trained by all ranks of `world`.

    `mesh` has the axes dp, pp and tp in the order of `config.mesh_order`; with `hybrid_shard_size`
    replicate and shard in the place of dp, and with `diloco` another one, island, outermost: then
    this is one island's part, and what belongs to one model stays inside an island.
    `dp` is the group of all data-parallel ranks, `group` that of all ranks of this model. `data`
    are the ranks that each have rows of their own: dp, of all islands. The ranks of one place in it
    all get the same rows.
    `number` counts the steps taken; with `config.seed` it decides what dropout drops.

    `torch.optim.AdamW(parallel.parameters())` and `clip_grad_norm_(parallel, 1.0)` do what they do
    in one process.
    """

    def __init__(self, model, config, world, plan=GPT_PLAN):
        super().__init__()
        self.config = config
        self.mesh = mesh_of(config, world)
        inside = [axis for axis in self.mesh.axes if axis != "island"]
        replicas = [axis for axis in inside if axis not in ("pp", "tp")]
        self.dp, self.pp, self.tp = self.mesh[tuple(replicas)], self.mesh["pp"], self.mesh["tp"]
        self.group = self.mesh[tuple(inside)]
        self.data = self.dp
        if "island" in self.mesh.axes:
            self.data = self.mesh[("island", *replicas)]
        schedule = config.schedule()
        self.logits_cut = self.tp.size > 1 and leaves_logits_cut(model, plan)
        if config.sequence_parallel and not self.logits_cut:
            raise ValueError(
                "sequence_parallel leaves each rank the logits of its own tokens unless the plan "
                'cuts the layer that gives them: give it the style "vocab"'
            )
        part = (self.tp.rank, self.tp.size) if config.sequence_parallel else (0, 1)
        place_dropout(model, *part)
        self.aliases = aliases(model)
        blocks = set(repeated_blocks(model))
        stages = split(model, schedule.stages)
        refuse_left_out(model, stages)
        own = schedule.stages_of(self.pp.rank)
        for number in own:
            if any(p.is_meta for p in stages[number].parameters()):
                materialize(stages, number, config.seed)
        # Number of a stage -> the stage, before replicas were put around it.
        self.parts = {number: stages[number].to(DTYPES[config.precision]) for number in own}
        copies = [self.wrap(stage, blocks, plan) for stage in self.parts.values()]
        self.places = [Places(stage, config.seed) for stage in self.parts.values()]
        self.pipeline = Pipeline(
            copies, self.pp, schedule, self.loss, count=count_targets, tied=stages.tied
        )
        self.last = schedule.rank_of[schedule.stages - 1]
        self.number = 0

    def wrap(self, stage, blocks, plan):
        """A stage cut over tp, and its copies or shards over dp."""
        config = self.config
        units = [module for module in stage.modules() if module in blocks]
        if config.activation_checkpointing:
            for block in units:
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        if self.tp.size > 1:
            names = [name for name, _ in stage.named_modules()]
            here = {p: s for p, s in plan.items() if any(matches(name, p) for name in names)}
            tensor_parallel(stage, self.tp, here, config.sequence_parallel)
        mixed = torch.bfloat16 if config.precision == "bfloat16" else None
        if not (config.zero_stage or mixed):
            return DDP(stage, self.dp)
        group, replicate = self.dp, None
        if config.hybrid_shard_size:
            group, replicate = self.mesh["shard"], self.mesh["replicate"]
        return ZeRO(stage, group, config.zero_stage, replicate, units=units, param_dtype=mixed)

    def loss(self, logits, targets):
        if self.tp.size > 1 and logits.grad_fn is not None:
            self.check_logits(logits)
        if self.logits_cut:
            return vocab_parallel_cross_entropy(logits, targets, self.tp)
        return next_token_loss(logits, targets)

    def check_logits(self, logits):
        if comes_from_column(logits) and not self.logits_cut:
            raise ValueError(
                "the plan cuts the layer that gives the logits, and does not say so: give that "
                'layer the style "vocab", or Column(gather=True)'
            )

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Forward and backward of this replica's rows, tokens and targets [rows, T]; the loss.

        The loss is the mean over the global batch (of islands: over this one's part), float64, the
        same number on every rank: an average over dp of 8 bytes where the last stage is, and a
        broadcast of it over pp. All replicas give equally many rows and counted targets.
        """
        cuts = even_cuts(len(x), self.pipeline.schedule.microbatches)
        for places in self.places:
            places.begin(self.number, [self.data.rank * len(x) + cut for cut in cuts[:-1]])
        loss = self.mean_loss(self.pipeline.step(x, y))
        self.number += 1
        return loss

    def evaluate(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The loss of these rows as `step` tells it, forward alone. Does not call `.eval()`."""
        return self.mean_loss(self.pipeline.evaluate(x, y))

    def mean_loss(self, loss):
        if loss is None:
            loss = torch.zeros(())
        loss = loss.detach().to(torch.float64)
        if self.pp.rank == self.last:
            loss = all_reduce(loss, self.dp, "avg")
        return broadcast(loss, self.pp, self.last)


def leaves_logits_cut(model, plan) -> bool:
    """Whether a plan has a "vocab" Linear, which gives this rank's columns of the logits.

    ValueError for a pattern that fits no layer of the whole model: a stage may have none of them.
    """
    return any(
        isinstance(style, Vocab)
        and not style.gather
        and isinstance(model.get_submodule(name), nn.Linear)
        for name, style in match(model, plan).items()
    )


def mesh_of(config: Config, world: Group) -> Mesh:
    """The mesh that a config asks for; ValueError where it has another number of ranks."""
    sizes = {
        "dp": config.data_parallel_size,
        "pp": config.pipeline_parallel_size,
        "tp": config.tensor_parallel_size,
    }
    axes = {"island": config.islands} if config.diloco else {}
    for axis in config.mesh_order:
        if axis == "dp" and config.hybrid_shard_size:
            axes["replicate"] = sizes["dp"] // config.hybrid_shard_size
            axes["shard"] = config.hybrid_shard_size
        else:
            axes[axis] = sizes[axis]
    return Mesh(world, **axes)


def count_targets(targets):
    return (targets != -100).sum()


def aliases(model) -> dict[str, str]:
    """Another name of a tied parameter, or of a buffer that modules share -> its first name."""
    first, others = {}, {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if first.setdefault(id(tensor), name) != name:
            others[name] = first[id(tensor)]
    return others


def refuse_left_out(model, stages):
    """ValueError, with its name, for a parameter that no stage has: nobody would average it, step
    it or save it. (A buffer that the forward does not use is left out.)"""
    reached = {id(p) for stage in stages for p in stage.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in reached:
            raise ValueError(
                f"{name} is used by no stage, so it would be neither trained nor saved: remove it, "
                "or use it in the model's forward"
            )
