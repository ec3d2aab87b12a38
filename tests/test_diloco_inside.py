"""Islands that are several ranks each: DiLoCo between them gives what it gives between single ones.

Two islands are trained in one process (the simulation of diloco_training.py, which shares nothing
with the library), and then with each strategy inside them. The pseudo-gradient of another part, an
average over ranks that hold different ones, weights that a ZeRO still has from before a sync, or a
norm taken over both islands shows there. What travels between islands is counted.
"""

import torch
import torch.nn.functional as F
from diloco_training import Simulation, adamw, assert_equal, assert_same, build, weights
from torch import nn

from s2s_lib import (
    DDP,
    DiLoCo,
    Mesh,
    Pipeline,
    ZeRO,
    bill,
    clip_grad_norm_,
    full_state_dict,
    launch,
    schedule,
    tensor_parallel,
)

WIDTH, ROWS, STEPS, EVERY, CLIP = 6, 8, 7, 2, 0.05
PLAN = {"*.0": "column", "*.2": "row"}


def block():
    return nn.Sequential(nn.Linear(WIDTH, 10), nn.Tanh(), nn.Linear(10, WIDTH))


def two_blocks():
    return nn.Sequential(block(), block())


def batch(island, step, dtype=torch.float64):
    random = torch.Generator().manual_seed(1000 * island + step)
    return torch.randn(2, ROWS, WIDTH, generator=random, dtype=dtype).unbind()


def train_alone(model, optimizer, island, step):
    """An inner step of an island that is one process."""
    x, y = batch(island, step, next(model.parameters()).dtype)
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    assert nn.utils.clip_grad_norm_(model.parameters(), CLIP) > CLIP
    optimizer.step()


def alone(parts=None, make=two_blocks, **outer):
    simulation = Simulation(2, EVERY, make=make, take_step=train_alone, parts=parts, **outer)
    return weights(simulation.steps(1, STEPS).flush().models[0])


# The same inside: each gives a model, the group over which rows are cut, and the whole weights


def replicas(world, wrap, inside):
    mesh = Mesh(world, island=2, **inside)
    model = wrap(build(two_blocks, seed=world.rank), mesh)
    return mesh, model, mesh[tuple(inside)]


def ddp(world):
    return replicas(world, lambda model, mesh: DDP(model, mesh["dp"]), {"dp": 2})


def zero(stage, **settings):
    return lambda world: replicas(
        world, lambda model, mesh: ZeRO(model, mesh["dp"], stage, **settings), {"dp": 2}
    )


def hybrid(world):
    def wrap(model, mesh):
        return ZeRO(model, mesh["shard"], 3, replicate=mesh["replicate"])

    return replicas(world, wrap, {"replicate": 2, "shard": 2})


def tensor(world):
    mesh = Mesh(world, island=2, tp=2)
    return mesh, tensor_parallel(build(two_blocks, world.rank), mesh["tp"], PLAN), None


def pipeline(world, tp=1):
    mesh = Mesh(world, island=2, pp=2, tp=tp)
    # Ranks of an island that hold one stage draw the same.
    stages = build(two_blocks, seed=mesh.coordinate["island"])
    if tp > 1:
        tensor_parallel(stages, mesh["tp"], PLAN)
    plan = schedule.one_f_one_b(2, 4)
    return mesh, Pipeline(list(stages), mesh["pp"], plan, F.mse_loss), None


def pipeline_of_parts(world):
    return pipeline(world, tp=2)


def step_inside(model, rows, x, y):
    if rows is not None:
        x, y = (t.chunk(rows.size)[rows.rank] for t in (x, y))
    if isinstance(model, Pipeline):
        return model.step(x, y)
    F.mse_loss(model(x), y).backward()


def whole_weights(model):
    if isinstance(model, ZeRO):
        return model.full_state_dict()
    if isinstance(model, DDP):
        return weights(model.module)
    if isinstance(model, Pipeline):
        return {
            f"{number}.{name}": tensor
            for number, stage in model.module_of.items()
            for name, tensor in full_state_dict(stage).items()
        }
    return full_state_dict(model)


def train_inside(world, make, **options):
    """The whole weights as this rank sees them, the bytes sent between islands, and the names that
    it syncs together."""
    mesh, model, rows = make(world)
    if not isinstance(model, Pipeline):
        with torch.no_grad():
            # A ZeRO has gathered its weights before the first island's come.
            model(batch(0, 0)[0])
    optimizer = adamw(model)
    with bill() as sent, DiLoCo(model, optimizer, mesh["island"], EVERY, **options) as diloco:
        at_first = sent.by("group").get(mesh["island"].ranks, 0)
        for step in range(1, STEPS + 1):
            optimizer.zero_grad()
            step_inside(model, rows, *batch(mesh.coordinate["island"], step))
            clip_grad_norm_(model, CLIP)
            optimizer.step()
    between = sent.by("group")[mesh["island"].ranks] - at_first
    names = [[name.removeprefix("module.") for name in f.names] for f in diloco.fragments]
    return whole_weights(model), between, names


def assert_like_single_islands(results, want, what):
    seen = set()
    for rank, (got, *_) in enumerate(results):
        assert_same(got, {name: want[name] for name in got}, f"{what}, rank {rank}")
        seen |= got.keys()
    assert seen == want.keys(), what


FOUR = [ddp, zero(1), zero(2), zero(3), tensor, pipeline]
EIGHT = [hybrid, pipeline_of_parts]


def all_of(world, makes, options):
    return [train_inside(world, make, **options) for make in makes]


def test_two_islands_of_two_ranks_take_the_steps_of_two_single_ones():
    want = alone()
    for number, results in enumerate(zip(*launch(all_of, FOUR, {}, ranks=4), strict=True)):
        assert_like_single_islands(results, want, f"layout {number} of four")


def test_two_islands_of_four_ranks_take_the_steps_of_two_single_ones():
    want = alone()
    for number, results in enumerate(zip(*launch(all_of, EIGHT, {}, ranks=8), strict=True)):
        assert_like_single_islands(results, want, f"layout {number} of eight")


def test_they_do_so_with_fragments_a_delay_and_mixing():
    options = {"fragments": 2, "delay": 1, "mixing": 0.5}
    for results in zip(*launch(all_of, [ddp, tensor], options, ranks=4), strict=True):
        names = results[0][2]
        assert len(names) == 2 and all(theirs == names for *_, theirs in results)
        want = alone(parts=names, delay=1, mixing=0.5)
        assert_like_single_islands(results, want, str(names))


def test_sharded_islands_send_each_weight_once_and_replicas_all_of_theirs():
    nbytes = sum(p.nbytes for p in build(two_blocks).parameters())
    # Three full rounds and a flush; between two islands each weight crosses in both directions.
    syncs = 4
    by_ddp, zero_1, _, zero_3, by_parts, by_stages = (
        sum(sent for _, sent, _ in results)
        for results in zip(*launch(all_of, FOUR, {}, ranks=4), strict=True)
    )
    assert zero_1 == zero_3 == by_stages == syncs * 2 * nbytes
    assert by_ddp == 2 * syncs * 2 * nbytes
    # The biases of row layers are whole on both ranks.
    assert by_parts == syncs * 2 * (nbytes + 2 * WIDTH * 8)


def train_in_sixteen_bits(world, stage):
    """The whole masters, and what the model makes of a batch, which it does with 16-bit weights."""
    mesh = Mesh(world, island=2, dp=2)
    torch.manual_seed(world.rank)
    model = ZeRO(two_blocks(), mesh["dp"], stage, param_dtype=torch.bfloat16)
    optimizer = adamw(model)
    with DiLoCo(model, optimizer, mesh["island"], EVERY) as diloco:
        for step in range(1, STEPS + 1):
            optimizer.zero_grad()
            x, y = (t.bfloat16() for t in batch(mesh.coordinate["island"], step))
            step_inside(model, mesh["dp"], x, y)
            clip_grad_norm_(model, CLIP)
            optimizer.step()
    assert [row.dtype for row in diloco.rows] == [torch.float32]
    x, _ = batch(0, 0)
    with torch.no_grad():
        used = model(x.bfloat16())
    return model.full_state_dict(), used


def test_sixteen_bit_weights_in_use_follow_the_outer_steps_of_their_masters():
    want, start = alone(), weights(build(two_blocks))
    moved = max((want[name] - start[name]).abs().max() for name in want)
    for stage in (1, 3):
        results = launch(train_in_sixteen_bits, stage, ranks=4)
        for masters, used in results:
            assert_equal(masters, results[0][0])
            apart = max((masters[name] - want[name]).abs().max() for name in want)
            assert apart < moved / 5
            # What is in use is the masters, rounded.
            model = two_blocks()
            model.load_state_dict(masters)
            x, _ = batch(0, 0)
            assert torch.equal(used, model.bfloat16()(x.bfloat16()))
