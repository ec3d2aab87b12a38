"""Distributed training rebuilt from the ground up."""

import importlib

# The public names in reading order, and where each lives. They are imported on first use, so that
# what needs no torch does not load it.
_HOME = {
    "Link": "cluster",
    "GPU": "cluster",
    "Cluster": "cluster",
    "preset": "cluster",
    "launch": "ranks.launch",
    "RankError": "ranks.failure",
    "Group": "ranks.group",
    "Mesh": "ranks.group",
    "Islands": "ranks.islands",
    "send": "ranks.messages",
    "recv": "ranks.messages",
    "isend": "ranks.messages",
    "irecv": "ranks.messages",
    "broadcast": "collectives.functions",
    "reduce": "collectives.functions",
    "all_reduce": "collectives.functions",
    "reduce_scatter": "collectives.functions",
    "all_gather": "collectives.functions",
    "gather": "collectives.functions",
    "scatter": "collectives.functions",
    "all_to_all": "collectives.functions",
    "barrier": "collectives.functions",
    "quantised_all_reduce": "collectives.quantised",
    "choose": "collectives.choose",
    "cost": "collectives.choose",
    "background": "collectives.background",
    "bill": "meters.bill",
    "timeline": "meters.timeline",
    "Timelines": "meters.timeline",
    "memory": "meters.memory",
    "DDP": "strategies.ddp",
    "ZeRO": "strategies.zero",
    "schedule": "strategies.pipeline",
    "simulate": "strategies.pipeline.simulate",
    "measured": "strategies.pipeline.simulate",
    "split": "strategies.pipeline.partition.split",
    "materialize": "strategies.pipeline.partition.materialize",
    "Pipeline": "strategies.pipeline.run",
    "generate": "strategies.pipeline.stream",
    "copy_to_group": "strategies.tensor.pairs",
    "reduce_from_group": "strategies.tensor.pairs",
    "scatter_to_group": "strategies.tensor.pairs",
    "gather_from_group": "strategies.tensor.pairs",
    "gather_sequence": "strategies.tensor.pairs",
    "reduce_scatter_sequence": "strategies.tensor.pairs",
    "ColumnParallelLinear": "strategies.tensor.layers",
    "RowParallelLinear": "strategies.tensor.layers",
    "VocabParallelEmbedding": "strategies.tensor.layers",
    "vocab_parallel_cross_entropy": "strategies.tensor.loss",
    "Column": "strategies.tensor.plan",
    "Row": "strategies.tensor.plan",
    "Vocab": "strategies.tensor.plan",
    "tensor_parallel": "strategies.tensor.apply",
    "full_state_dict": "strategies.tensor.state",
    "load_full_state_dict": "strategies.tensor.state",
    "clip_grad_norm_": "strategies.grads",
    "DiLoCo": "strategies.diloco.diloco",
    "load_config": "training.config",
    "Config": "training.config",
    "parallelize": "training.parallel",
    "checkpoint": "training.checkpoint",
    "train": "training.train",
    "GPT": "course.model",
    "GPTConfig": "course.model",
    "GPT_PLAN": "course.plans",
    "next_token_loss": "course.model",
    "text": "course.data",
    "hold_out": "course.data",
    "Batches": "course.data",
    "evaluation": "course.data",
    "show": "course.show",
}

__all__ = list(_HOME)


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"s2s_lib has no public name {name!r}")
    module = importlib.import_module(f"s2s_lib.{_HOME[name]}")
    # A module whose functions read best with its name: checkpoint.save, checkpoint.load.
    value = getattr(module, name, module)
    globals()[name] = value
    return value


def __dir__():
    return sorted([*globals(), *__all__])


def load_ipython_extension(shell):
    """`%load_ext s2s_lib`: cell-by-cell ranks with state; see s2s_lib/ranks/magics.py."""
    from s2s_lib.ranks.magics import RankMagics

    shell.register_magics(RankMagics)


def unload_ipython_extension(shell):
    """End the ranks."""
    shell.magics_manager.registry["RankMagics"].dist_shutdown()
