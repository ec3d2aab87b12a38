"""Models that are not the course's GPT: buffers, shared modules and weights, their own dropout."""

from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from s2s_lib import (
    GPT,
    Config,
    checkpoint,
    clip_grad_norm_,
    launch,
    load_config,
    next_token_loss,
    parallelize,
)

TINY = {"layers": 1, "hidden": 16, "heads": 4, "seq": 8, "mlp_hidden": 16, "tied": False}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("sphinx of black quartz, judge my vow. " * 40)
    return tmp_path


def config_of(**keys):
    keys = {"model": TINY, "precision": "float64", "steps": 2, "data": {"path": "text.txt"}} | keys
    Path("mine.yaml").write_text(yaml.safe_dump(keys, sort_keys=False))
    return load_config("mine.yaml")


class Mix(nn.Module):
    def __init__(self, width, drop, norm=False):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = drop
        self.norm = nn.BatchNorm1d(width) if norm else None

    def forward(self, x):
        if self.norm is not None:
            x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return x + self.drop(self.down(self.up(x).relu()))


class Words(nn.Module):
    """Blocks between a table and a head; `shared` is one dropout, or one block, for all of them."""

    def __init__(self, shared=None, norm=False, tied=False):
        super().__init__()
        drop = nn.Dropout(0.4)
        self.table = nn.Embedding(13, 8)
        block = Mix(8, drop)
        self.blocks = nn.ModuleList(
            block
            if shared == "block"
            else Mix(8, drop if shared == "dropout" else nn.Dropout(0.4 if shared else 0.0), norm)
            for _ in range(3)
        )
        self.head = nn.Linear(8, 13, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def words(**how):
    torch.manual_seed(2)
    return Words(**how)


def rows(step, count=4, vocab=13):
    tokens = torch.randint(0, vocab, (count, 7), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def steps_of(world, config, how, folder=None, first=0, last=3, eval_mode=False):
    try:
        parallel = parallelize(words(**how), config, world, plan={})
    except ValueError as error:
        return str(error)
    if eval_mode:
        parallel.eval()
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.02)
    if first:
        checkpoint.load(folder, parallel, optimizer)
    told = []
    for step in range(first, last):
        x, y = (part.chunk(parallel.dp.size)[parallel.dp.rank] for part in rows(step))
        optimizer.zero_grad()
        loss = float(parallel.step(x, y))
        norm = float(clip_grad_norm_(parallel, 1.0))
        optimizer.step()
        told.append((loss, norm))
    if folder:
        checkpoint.save(folder, parallel, optimizer, {})
    return told


@pytest.mark.parametrize(
    "keys", [dict(data_parallel_size=2), dict(pipeline_parallel_size=2, gradient_accumulation=2)]
)
@pytest.mark.parametrize("shared", ["no", "dropout"])
def test_a_dropout_that_all_blocks_share_drops_the_same_at_every_layout(keys, shared, folder):
    """Broken by replacing a module by the first of its names: by the others it is torch's own, and
    what it drops depends on the layout, without a word."""
    how = {"shared": shared}
    one = launch(steps_of, config_of(global_batch=4), how, ranks=1)[0]
    for told in launch(steps_of, config_of(global_batch=4, **keys), how, ranks=2):
        for mine, alone in zip(told, one, strict=True):
            assert mine == pytest.approx(alone, rel=1e-9)


@pytest.mark.parametrize("how", [dict(shared="block"), dict(tied=True)], ids=["block", "tied"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_one_weight_in_two_stages_is_one_weight_or_refused(how, stage, folder):
    """Broken by averaging, stepping, clipping or saving a weight that two stages have as two."""
    config = config_of(
        global_batch=4,
        data_parallel_size=2,
        pipeline_parallel_size=2,
        zero_stage=stage,
        gradient_accumulation=2,
    )
    model = words(**how).double().eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    told = []
    for step in range(3):
        x, y = rows(step)
        optimizer.zero_grad()
        loss = next_token_loss(model(x), y)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        told.append((loss.item(), norm.item()))
    for answer in launch(steps_of, config, how, folder / "saved", 0, 3, True, ranks=4):
        if stage and isinstance(answer, str):
            assert "one" in answer or "tied" in answer or "stage" in answer
            continue
        for mine, alone in zip(answer, told, strict=True):
            assert mine == pytest.approx(alone, rel=1e-9)
    if checkpoint.latest(folder / "saved"):
        saved = checkpoint.export(folder / "saved")
        for name, value in model.state_dict().items():
            torch.testing.assert_close(saved[name], value, rtol=1e-8, atol=1e-10, msg=name)


def test_a_run_with_running_averages_goes_on_bit_by_bit(folder):
    """Broken by buffers that a stage does not save, or a counter that becomes a float."""
    config = config_of(
        global_batch=4, data_parallel_size=2, pipeline_parallel_size=2, gradient_accumulation=2
    )
    how = {"norm": True}
    whole = launch(steps_of, config, how, folder / "whole", 0, 4, ranks=4)
    launch(steps_of, config, how, folder / "parts", 0, 2, ranks=4)
    rest = launch(steps_of, config, how, folder / "parts", 2, 4, ranks=4)
    assert [told[2:] for told in whole] == rest
    a, b = checkpoint.export(folder / "whole"), checkpoint.export(folder / "parts")
    assert all(torch.equal(a[name], b[name]) for name in a) and set(a) == set(
        words(norm=True).state_dict()
    )
    assert a["blocks.0.norm.num_batches_tracked"].dtype == torch.int64


def direct(world, output):
    try:
        with torch.device("meta"):
            model = GPT(Config(output=output).gpt())
        parallelize(model, Config(output=output), world)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "built"


def test_a_config_made_without_a_file_works_or_says_what_it_lacks(folder):
    """Broken by the numbers that only `load_config` works out."""
    answer = launch(direct, "run", ranks=1)[0]
    assert answer.startswith("ValueError") and "load_config" in answer


def bfloat(world, config, folder, load):
    with torch.device("meta"):
        model = GPT(config.gpt())
    parallel = parallelize(model, config, world)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.01)
    if load:
        checkpoint.load(folder, parallel, optimizer)
    else:
        x = (
            torch.arange(64)
            .view(8, 8)
            .repeat(2, 1)[: config.global_batch]
            .chunk(parallel.dp.size)[parallel.dp.rank]
        )
        parallel.step(x, x)
        optimizer.step()
    checkpoint.save(folder, parallel, optimizer, {"to": config.mesh_order})


def test_a_mixed_run_carried_over_four_layouts_keeps_every_bit(folder):
    """Broken by saving the bfloat16 copy for the float32 weights, or moments through another dtype:
    each hop only loads and saves, and nothing may change."""
    layouts = [
        dict(data_parallel_size=3, zero_stage=3, global_batch=9),
        dict(tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=1, zero_stage=1),
        dict(
            data_parallel_size=4, hybrid_shard_size=2, zero_stage=2, mesh_order=["tp", "dp", "pp"]
        ),
        dict(pipeline_parallel_size=3, zero_stage=3),
        dict(data_parallel_size=1, precision="float32"),
    ]
    seen = []
    for number, keys in enumerate(layouts):
        config = config_of(**{"precision": "bfloat16"} | keys)
        launch(bfloat, config, folder / "saved", number > 0, ranks=config.ranks)
        seen.append(checkpoint.export(folder / "saved"))
    for other in seen[1:]:
        assert all(torch.equal(seen[0][name], other[name]) for name in seen[0])
    assert {w.dtype for w in seen[0].values()} == {torch.float32}
    assert any((w.bfloat16().float() != w).any() for w in seen[0].values())
