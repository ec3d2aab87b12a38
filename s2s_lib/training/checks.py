"""What the keys of a configuration must agree on, each with the numbers and the way out.

A problem names every key that it depends on, the one to look at first in front. It is told at the
first of them that was given, and not at all where one of them is wrong by itself.
"""

import math
from collections.abc import Iterator

from s2s_lib.training.yaml_lines import Problem

# The schedule is made and checked action by action, on every rank.
MOST_MICRO_BATCHES = 1024
SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
SCHEDULE = ("pipeline_schedule", "stages_per_rank", "pipeline_parallel_size")
BATCH = (
    "global_batch",
    "micro_batch_size",
    "gradient_accumulation",
    "data_parallel_size",
    "diloco.islands",
)


def check(config) -> list[Problem]:
    """All that does not fit together in a Config whose keys are each right by themselves."""
    return [problem for one in CHECKS for problem in one(config)]


def with_batch(config) -> tuple[dict, list[Problem]]:
    """The three numbers of a batch, those left out as they follow from the others.

    global_batch = micro_batch_size x gradient_accumulation x data_parallel_size, in sequences, and
    as much again on each further island of diloco. With too little given, gradient_accumulation is
    pipeline_parallel_size, so that every rank of a pipeline has work, and micro_batch_size 1.
    """
    total, rows, times = config.global_batch, config.micro_batch_size, config.gradient_accumulation
    replicas, copies, problem = config.replicas, copies_of(config), None
    if times is None and (total is None or rows is None):
        times = config.pipeline_parallel_size
    if rows is None and total is None:
        rows = 1
    if total is None:
        total = rows * times * replicas
    elif times is None:
        times, problem = share_out(total, "micro_batch_size", rows, replicas, copies)
    elif rows is None:
        rows, problem = share_out(total, "gradient_accumulation", times, replicas, copies)
    if total != rows * times * replicas and problem is None:
        problem = (
            f"{total}, but micro_batch_size {rows} x gradient_accumulation {times} x "
            f"{copies} = {rows * times * replicas}: give that, or leave one "
            "of the three out"
        )
    if times > MOST_MICRO_BATCHES and problem is None:
        problem = (
            f"{total} / (micro_batch_size {rows} x {copies}) makes {times} "
            f"micro-batches, at most {MOST_MICRO_BATCHES} are possible: use a larger "
            "micro_batch_size"
        )
    batch = {"global_batch": total, "micro_batch_size": rows, "gradient_accumulation": times}
    keys = (*BATCH, "pipeline_parallel_size")
    return batch, [Problem(keys, problem)] if problem else []


def copies_of(config) -> str:
    """What the number of replicas is made of."""
    words = f"data_parallel_size {config.data_parallel_size}"
    return words + (f" x diloco.islands {config.islands}" if config.diloco else "")


def share_out(total, name, number, replicas, copies):
    """total / (number x replicas), at least 1; and the problem where that is not whole."""
    parts = number * replicas
    if total % parts == 0:
        return total // parts, None
    below = total // parts * parts
    fits = f"{below} or {below + parts}" if below else f"{parts}"
    return max(1, total // parts), (
        f"{total} is no multiple of {name} {number} x {copies} = {parts}: "
        f"{fits} would do, or another {name}"
    )


def model_sizes(config) -> Iterator[Problem]:
    try:
        config.gpt()
    except ValueError as error:
        even = config.model.hidden % (2 * config.model.heads) == 0
        keys = ("model.kv_heads", "model.heads") if even else ("model.hidden", "model.heads")
        yield Problem((*keys, "model.size"), str(error))


def hybrid(config) -> Iterator[Problem]:
    inside, replicas = config.hybrid_shard_size, config.data_parallel_size
    if inside is None:
        return
    if replicas % inside:
        yield Problem(
            ("hybrid_shard_size", "data_parallel_size"),
            f"data_parallel_size {replicas} does not cut into groups of {inside}: "
            f"{alternatives(divisors(replicas))} would do",
        )
    if config.zero_stage == 0:
        yield Problem(
            ("hybrid_shard_size", "zero_stage"),
            "says how many ranks share shards, and zero_stage 0 makes none: give zero_stage 1, 2 "
            "or 3, or leave it out",
        )


def sequence(config) -> Iterator[Problem]:
    parts, tokens = config.tensor_parallel_size, config.model.seq
    if not config.sequence_parallel:
        return
    if parts == 1:
        yield Problem(
            ("sequence_parallel", "tensor_parallel_size"),
            "cuts the sequence over the ranks of tensor_parallel_size, which is 1: make that 2 or "
            "more, or leave sequence_parallel out",
        )
    elif tokens % parts:
        below = tokens // parts * parts
        yield Problem(
            ("model.seq", "sequence_parallel", "tensor_parallel_size", "model.size"),
            f"{tokens} tokens do not cut into {parts} equal parts (tensor_parallel_size with "
            f"sequence_parallel): {alternatives([below, below + parts])} would do",
        )


def tensor(config) -> Iterator[Problem]:
    parts, model = config.tensor_parallel_size, config.model
    if parts == 1 or any(model_sizes(config)):
        return
    even = {
        "heads": model.heads,
        "kv_heads": model.kv_heads or model.heads,
        "mlp_hidden": mlp_width(config.gpt()),
    }
    broken = [f"{name} {size}" for name, size in even.items() if size % parts]
    # A vocabulary is cut into parts that may differ by one row, but none may be empty.
    broken += [f"vocab {model.vocab}"] if model.vocab < parts else []
    if not broken:
        return
    fits = [
        n
        for n in divisors(even["heads"])
        if n <= model.vocab and not any(size % n for size in even.values())
    ]
    yield Problem(
        ("tensor_parallel_size", *(f"model.{name}" for name in ("size", "hidden", "vocab", *even))),
        f"{parts} ranks cannot share {' and '.join(broken)} of the model: "
        f"{alternatives(fits)} would do",
    )


def mlp_width(gpt) -> int:
    import torch

    from s2s_lib.course.model import MLP

    with torch.device("meta"):
        return MLP(gpt).up.out_features


def stages_allowed(config) -> tuple[int, float]:
    """How many stages a rank has with this schedule, at least and at most."""
    return {"interleaved": (2, math.inf), "zbv": (2, 2)}.get(config.pipeline_schedule, (1, 1))


def stages(config) -> Iterator[Problem]:
    name, per_rank = config.pipeline_schedule, config.stages_per_rank
    least, most = stages_allowed(config)
    if not least <= per_rank <= most:
        several = "interleaved takes 2 or more, zbv 2, the others 1"
        yield Problem(
            ("stages_per_rank", "pipeline_schedule"), f"{per_rank} with {name}: {several}"
        )
        return
    # What `split` takes as a layer. The norm alone has nothing that ranks of tp could share.
    parts, names = config.model.layers + 3, "embedding, blocks, norm, head"
    if config.tensor_parallel_size > 1:
        parts, names = parts - 1, "embedding, blocks, norm and head, with tensor_parallel_size > 1"
    if config.stages > parts:
        least = config.stages - (parts - config.model.layers)
        yield Problem(
            (*SCHEDULE[::-1], "model.layers", "model.size", "tensor_parallel_size"),
            f"{config.pipeline_parallel_size} ranks x {per_rank} = {config.stages} stages, and a "
            f"model of {config.model.layers} layers has {parts} parts ({names}): use at most "
            f"{parts // per_rank} ranks, or layers of at least {least}",
        )


def schedule(config) -> Iterator[Problem]:
    """What the schedule itself refuses, and what it cannot be used with."""
    if any(stages(config)) or config.micro_batches > MOST_MICRO_BATCHES:
        return
    try:
        schedule = config.schedule()
    except ValueError as error:
        yield Problem((*SCHEDULE, *BATCH), str(error))
        return
    name, several = config.pipeline_schedule, schedule.stages > 1
    mixed = config.precision == "bfloat16"
    apart = any(action.kind == "I" for line in schedule.ranks for action in line)
    if apart and (config.zero_stage or mixed):
        why = f"zero_stage {config.zero_stage}" if config.zero_stage else "precision bfloat16"
        out = "zero_stage: 0" if config.zero_stage else "precision: float32"
        yield Problem(
            ("pipeline_schedule", "zero_stage", "precision"),
            f"{name} takes the backward apart, and what {why} puts around the weights allows it "
            f"only whole: use one_f_one_b or interleaved, or {out}",
        )
    if not (config.model.tied and several):
        return
    tied = ("model.tied", "zero_stage", *SCHEDULE[::-1], "model.size")
    if config.zero_stage:
        yield Problem(
            tied,
            f"the first of {schedule.stages} stages has the embedding, the last the head, they are "
            f"one weight, and zero_stage {config.zero_stage} would cut it differently in each: "
            "give model.tied: false, or zero_stage: 0",
        )
    elif schedule.rank_of[0] == schedule.rank_of[-1]:
        yield Problem(
            tied,
            f"{name} on {len(schedule.ranks)} ranks has the first stage and the last on one rank, "
            "the embedding and the head are one weight, and the replicas of two stages would each "
            "average it: give model.tied: false, or a schedule with one stage a rank",
        )


def diloco(config) -> Iterator[Problem]:
    from s2s_lib.strategies.diloco.checks import check_numbers

    keys = config.diloco
    if keys is None:
        return
    options = keys.model_dump(exclude={"islands"})
    try:
        check_numbers(options)
    except ValueError as error:
        name = str(error).partition("=")[0]
        others = (f"diloco.{key}" for key in options if key != name)
        yield Problem((f"diloco.{name}", *others), str(error))
        return
    between = keys.sync_every // keys.fragments
    if config.checkpoint.every and keys.delay >= between:
        yield Problem(
            ("diloco.delay", "diloco.sync_every", "diloco.fragments", "checkpoint.every"),
            f"{keys.delay}, and a fragment is sent every {between} steps, so one is always under "
            f"way, and nothing can be saved: give at most {between - 1}, or checkpoint.every: 0",
        )


def hardware(config) -> Iterator[Problem]:
    cluster = config.cluster_object()
    if cluster is None or cluster.size == config.ranks:
        return
    per_node, rest = divmod(config.ranks, cluster.nodes)
    factors = " x ".join(f"{name} {getattr(config, name)}" for name in SIZES)
    factors += f" x diloco.islands {config.islands}" if config.diloco else ""
    out = f", {per_node} GPUs in each of the {cluster.nodes} nodes say" if not rest else ""
    yield Problem(
        ("cluster.gpus_per_node", "cluster.nodes", "cluster", *SIZES, "diloco.islands"),
        f"{cluster.nodes} nodes x {cluster.gpus_per_node} = {cluster.size} GPUs, but {factors} = "
        f"{config.ranks} ranks: make them equal{out}",
    )


CHECKS = (model_sizes, hybrid, sequence, tensor, stages, schedule, diloco, hardware)


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def alternatives(numbers) -> str:
    numbers = [str(n) for n in numbers if n]
    return numbers[0] if len(numbers) == 1 else f"{', '.join(numbers[:-1])} or {numbers[-1]}"
