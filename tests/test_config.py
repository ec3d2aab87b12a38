"""Configurations: what a file means, and what is said of one that means nothing.

Every refusal is asserted with its place, so a line counted from 0, a key of the wrong section or a
problem told at a key that is not in the file fails, as does a second problem that follows from the
first. The bounds of the tensor and pipeline checks are compared with what the strategies take: a
stage too many, or a head that does not divide, fails there. What is not a ConfigError fails
everywhere; a seeded mutation of a good file looks for more of those.
"""

import os
import pickle
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from s2s_lib import GPT, GPT_PLAN, GPTConfig, split
from s2s_lib.cluster import PRESETS
from s2s_lib.strategies.tensor.plan import check_plan, match
from s2s_lib.training.config import ConfigError, load_config

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))


@pytest.fixture
def load(tmp_path, monkeypatch):
    """load(text, *overrides): the Config of a file x.yaml with this text, or bytes."""
    monkeypatch.chdir(tmp_path)

    def load(text, *overrides):
        Path("x.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
        return load_config("x.yaml", overrides)

    return load


@pytest.fixture
def refused(load):
    """refused(text, *overrides): the lines of the ConfigError."""

    def refused(text, *overrides):
        with pytest.raises(ConfigError) as error:
            load(text, *overrides)
        return str(error.value).splitlines()

    return refused


# Text of the file; where and which key; words of what is said, in order.
BROKEN = {
    # Not a file of keys at all.
    "empty": ("", "x.yaml: ", "empty"),
    "only comments": ("# nothing\n\n", "x.yaml: ", "empty"),
    "a list": ("\n- steps: 5\n", "x.yaml:2: ", "a list where keys belong"),
    "one word": ("steps", "x.yaml:1: ", "one value where keys belong"),
    "binary": (b"PK\3\4\0\0", "x.yaml: ", "binary"),
    "UTF-16": ("steps: 5".encode("utf-16"), "x.yaml: ", "binary"),
    "Latin-1": (b"steps: 5\noutput: r\xe9sum\xe9\n", "x.yaml:2: ", "not UTF-8 (byte 0xe9)"),
    "too long": (b"# " + b"x" * 100_000, "x.yaml: ", "more than 100000 bytes"),
    "a control character": ("steps: 5\nseed: \x01\n", "x.yaml:2: ", "U+0001"),
    # No YAML.
    "no colon": ("steps: 5\nseed 3\noutput: x\n", "x.yaml:2: ", "the line is 'seed 3'"),
    "no colon at first": ("seed 3\nsteps: 4\n", "x.yaml:2: ", "missing in the line before"),
    "a bracket left open": ("seed: 1\nmesh_order: [dp, pp\n", "x.yaml:3: ", "began on line 2"),
    "a tab": ("model:\n\tlayers: 2\n", "x.yaml:2: ", "spaces, not with tabs"),
    "a quote left open": ("steps: 5\noutput: 'x\n", "x.yaml:3: ", "began on line 2"),
    "wrong indentation": ("model:\n  layers: 2\n   hidden: 4\n", "x.yaml:3: ", "colon too many"),
    "two documents": ("steps: 5\n---\nsteps: 6\n", "x.yaml:2: ", "one document"),
    "an alias of nothing": ("steps: 5\nseed: *a\n", "x.yaml:2: ", "undefined alias 'a'"),
    "no character": ('output: "\\UFFFFFFFF"', "x.yaml: ", "no character"),
    # Keys.
    "a typo": (
        "steps: 5\ntensor_paralel_size: 2\nsequence_parallel: true\n",
        "x.yaml:2: tensor_paralel_size: ",
        "no such key; did you mean tensor_parallel_size? There are tensor_parallel_size, pipe",
    ),
    "a typo inside": (
        "optimizer:\n  name: sgd\n  momentun: 0.5\n",
        "x.yaml:3: optimizer.momentun: ",
        "did you mean optimizer.momentum? There are name, lr, betas, eps, weight_decay, momentum",
    ),
    "a key of a section": ("lr: 0.1\n", "x.yaml:1: lr: ", "did you mean optimizer.lr?"),
    "a dotted key": ("optimizer.lr: 0.1\n", "x.yaml:1: optimizer.lr: ", "lr: indented below opti"),
    "a key that YAML takes for false": ("steps: 5\nno: 5\n", "x.yaml:2: no: ", "no such key"),
    "a number as a key": ("1: 5\n", "x.yaml:1: 1: ", "no such key"),
    "a list as a key": ("? [a]\n: 5\n", "x.yaml:1: ", "where a key belongs"),
    "half a character as a key": ('"\\ud800": 5\n', "x.yaml:1: ", "half a character"),
    "given twice": (
        "steps: 5\nseed: 1\nsteps: 6\n",
        "x.yaml:3: steps: ",
        "twice, here and at x.yaml:1",
    ),
    "given twice inside": (
        "model:\n  layers: 2\n  heads: 2\n  layers: 3\n",
        "x.yaml:4: model.layers: ",
        "twice, here and at x.yaml:2",
    ),
    "nothing of what is needed": ("cluster:\n  nodes: 2\n", "x.yaml:1: cluster.gpus_", "missing"),
    "a typo in what is needed": (
        "cluster: {nodes: 1, gpus_per_node: 1, intra: {gbits: 3}}\n",
        "x.yaml:1: cluster.intra.gbits: ",
        "did you mean cluster.intra.gbit_s?",
    ),
    # Values of the wrong type.
    "text for a number": (
        'steps: "5"\n',
        "x.yaml:1: steps: ",
        "given the text '5'; wanted a whole number from 1 to 1000000000",
    ),
    "true for a number": ("zero_stage: true\n", "x.yaml:1: zero_stage: ", "given true; wanted"),
    "1 for true": ("sequence_parallel: 1\n", "x.yaml:1: sequence_", "given 1; wanted true or fal"),
    "a share of a rank": (
        "data_parallel_size: 2.0\n",
        "x.yaml:1: data_parallel_size: ",
        "given 2.0; wanted a whole number",
    ),
    "an exponent for a whole number": ("steps: 1e3\n", "x.yaml:1: steps: ", "given 1e3; wanted a"),
    "nothing for a number": ("seed: 1\nsteps:\n", "x.yaml:2: steps: ", "given null; wanted"),
    "a list for a number": ("steps: [1, 2]\n", "x.yaml:1: steps: ", "given [1, 2]; wanted a"),
    "a list for a section": (
        "model:\n- layers: 2\n",
        "x.yaml:1: model: ",
        "given a list of 1; wan",
    ),
    "text for a section": (
        "seed: 1\noptimizer: adamw\n",
        "x.yaml:2: optimizer: ",
        "given the text 'adamw'; wanted keys of its own: name, lr",
    ),
    "a map for a list": ("mesh_order: {a: 1}\n", "x.yaml:1: mesh_order: ", "given a map of a; wan"),
    "a map for a word": ("precision: {}\n", "x.yaml:1: precision: ", "given a map; wanted one of"),
    "a number for a path": (
        "data:\n  path: 5\n",
        "x.yaml:2: data.path: ",
        "given 5; wanted a path",
    ),
    "no path": ("output: ''\n", "x.yaml:1: output: ", "given the text ''; wanted the path of a fo"),
    "a number for a link": (
        "cluster: {nodes: 1, gpus_per_node: 1, intra: 10}\n",
        "x.yaml:1: cluster.intra: ",
        "given 10; wanted keys of its own, as in {gbit_s: 10",
    ),
    "a number for a cluster": (
        "cluster: 8\n",
        "x.yaml:1: cluster: ",
        "given 8; wanted a preset (4",
    ),
    # Values out of bounds.
    "no ranks": (
        "pipeline_parallel_size: 0\n",
        "x.yaml:1: pipeline_",
        "given 0; wanted a whole nu",
    ),
    "less than none": ("model: {layers: -3}\n", "x.yaml:1: model.layers: ", "given -3; wanted a"),
    "a huge number": ("seed: 99999999999999999999\n", "x.yaml:1: seed: ", "from 0 to 4294967295"),
    "a number of 6000 digits": ("steps: " + "9" * 6000, "x.yaml:1: steps: ", "99999..."),
    "a number above all": (
        "lr_schedule: {final: 1e999}\n",
        "x.yaml:1: lr_schedule.final: ",
        "1e99",
    ),
    "no number": (
        "optimizer:\n  lr: .nan\n",
        "x.yaml:2: optimizer.lr: ",
        "given .nan; wanted a nu",
    ),
    "infinite": ("optimizer: {clip: .inf}\n", "x.yaml:1: optimizer.clip: ", "given .inf; wanted"),
    "octal": ("steps: 010\n", "x.yaml:1: steps: ", "010 has another base"),
    "minutes and seconds": ("steps: 1:30\n", "x.yaml:1: steps: ", "1:30 has another base"),
    "a beta of 1": (
        "optimizer: {betas: [0.9, 1]}\n",
        "x.yaml:1: optimizer.betas: ",
        "given [0.9, 1]",
    ),
    "one beta": (
        "optimizer: {betas: [0.9]}\n",
        "x.yaml:1: optimizer.betas: ",
        "wanted two numbers",
    ),
    "all dropped": ("model: {dropout: 1}\n", "x.yaml:1: model.dropout: ", "at least 0 and below 1"),
    "all held out": ("data: {hold_out: 1.0}\n", "x.yaml:1: data.hold_out: ", "above 0 and below 1"),
    "an axis twice": (
        "mesh_order: [dp, dp, tp]\n",
        "x.yaml:1: mesh_order: ",
        "dp, pp and tp in any",
    ),
    # Names.
    "another optimizer": (
        "optimizer: {name: adam}\n",
        "x.yaml:1: optimizer.name: ",
        "mean adamw? W",
    ),
    "another precision": (
        "precision: Float32\n",
        "x.yaml:1: precision: ",
        "did you mean float32? Wanted one of float64, float32, bfloat16",
    ),
    "another schedule": (
        "pipeline_schedule: zb-h1\n",
        "x.yaml:1: pipeline_sch",
        "did you mean zb_h1",
    ),
    "another size": ("model: {size: large}\n", "x.yaml:1: model.size: ", "wanted tiny or small"),
    "another cluster": (
        "cluster: dgx-h10\n",
        "x.yaml:1: cluster: ",
        "did you mean dgx-h100? Wanted",
    ),
    # Tags and aliases.
    "a tag that runs": (
        "seed: 1\nsteps: !!python/object/apply:os.system ['touch run']\n",
        "x.yaml:2: steps: ",
        "the tag !!python/object/apply:os.system asks for more",
    ),
    "a tag around all": ("!!python/object:x.Y\nsteps: 5\n", "x.yaml:1: ", "!!python/object:x.Y"),
    "a tag in a list": ("optimizer: {betas: [0, !!x 1]}\n", "x.yaml:1: optimizer.betas: ", "!!x"),
    "an int that is none": ("steps: !!int five\n", "x.yaml:1: steps: ", "five cannot be read"),
    "an int of nothing": ("steps: !!int ''\n", "x.yaml:1: steps: ", "cannot be read"),
    "an alias in itself": ("mesh_order: &a [*a]\n", "x.yaml:1: mesh_order: ", "no end"),
    "a merge of nothing": ("<<: 5\n", "x.yaml:1: ", "<< takes a map"),
    "half a character": ('output: "\\ud800"\n', "x.yaml:1: output: ", "half a character"),
    "nested deep": ("steps: " + "[" * 200 + "]" * 200, "x.yaml:1: steps: ", "more than 20 deep"),
    "nested too deep": ("steps: " + "[" * 1500, "x.yaml: ", "too deep to be read"),
    # What does not fit together.
    "a batch that is not the product": (
        "data_parallel_size: 2\nmicro_batch_size: 2\ngradient_accumulation: 4\nglobal_batch: 8\n",
        "x.yaml:4: global_batch: ",
        "8, but micro_batch_size 2 x gradient_accumulation 4 x data_parallel_size 2 = 16: give",
    ),
    "a batch that does not divide": (
        "data_parallel_size: 4\nglobal_batch: 10\n",
        "x.yaml:2: global_batch: ",
        "10 is no multiple of gradient_accumulation 1 x data_parallel_size 4 = 4: 8 or 12 would do",
    ),
    "a batch smaller than its parts": (
        "data_parallel_size: 4\nglobal_batch: 3\nmicro_batch_size: 1\n",
        "x.yaml:2: global_batch: ",
        "micro_batch_size 1 x data_parallel_size 4 = 4: 4 would do",
    ),
    "a batch of too many parts": (
        "global_batch: 2000\nmicro_batch_size: 1\n",
        "x.yaml:1: global_batch: ",
        "makes 2000 micro-batches, at most 1024 are possible: use a larger micro_batch_size",
    ),
    "hidden and heads": (
        "model:\n  hidden: 50\n",
        "x.yaml:2: model.hidden: ",
        "hidden 50 does not cut into 4 heads of even width",
    ),
    "query and key heads": (
        "model: {kv_heads: 3}\n",
        "x.yaml:1: model.kv_heads: ",
        "must divide 4",
    ),
    "heads that ranks cannot share": (
        "seed: 1\ntensor_parallel_size: 3\n",
        "x.yaml:2: tensor_parallel_size: ",
        "3 ranks cannot share heads 4 and kv_heads 4 of the model: 1, 2 or 4 would do",
    ),
    "key heads that ranks cannot share": (
        "tensor_parallel_size: 4\nmodel: {kv_heads: 2}\n",
        "x.yaml:1: tensor_parallel_size: ",
        "4 ranks cannot share kv_heads 2 of the model: 1 or 2 would do",
    ),
    "an MLP that ranks cannot share": (
        "tensor_parallel_size: 4\nmodel: {mlp_hidden: 30}\n",
        "x.yaml:1: tensor_parallel_size: ",
        "4 ranks cannot share mlp_hidden 30 of the model: 1 or 2 would do",
    ),
    "a vocabulary smaller than the ranks": (
        "tensor_parallel_size: 4\nmodel: {vocab: 3}\n",
        "x.yaml:1: tensor_parallel_size: ",
        "vocab 3",
    ),
    "a sequence over one rank": (
        "steps: 5\nsequence_parallel: true\n",
        "x.yaml:2: sequence_parallel: ",
        "over the ranks of tensor_parallel_size, which is 1",
    ),
    "a sequence that does not divide": (
        "tensor_parallel_size: 4\nsequence_parallel: true\nmodel:\n  seq: 30\n",
        "x.yaml:4: model.seq: ",
        "30 tokens do not cut into 4 equal parts (tensor_parallel_size with sequence_parallel): "
        "28 or 32 would do",
    ),
    "a hybrid without shards": (
        "data_parallel_size: 4\nhybrid_shard_size: 2\n",
        "x.yaml:2: hybrid_shard_size: ",
        "zero_stage 0 makes none: give zero_stage 1, 2 or 3",
    ),
    "a hybrid that does not divide": (
        "data_parallel_size: 4\nhybrid_shard_size: 3\nzero_stage: 3\n",
        "x.yaml:2: hybrid_shard_size: ",
        "data_parallel_size 4 does not cut into groups of 3: 1, 2 or 4 would do",
    ),
    "more stages than layers": (
        "pipeline_parallel_size: 8\n",
        "x.yaml:1: pipeline_parallel_size: ",
        "8 ranks x 1 = 8 stages, and a model of 4 layers has 7 parts (embedding, blocks, norm, "
        "head): use at most 7 ranks, or layers of at least 5",
    ),
    "more stages than layers, interleaved": (
        "pipeline_schedule: interleaved\npipeline_parallel_size: 4\n",
        "x.yaml:2: pipeline_parallel_size: ",
        "4 ranks x 2 = 8 stages",
    ),
    "several stages a rank without a schedule for it": (
        "stages_per_rank: 2\n",
        "x.yaml:1: stages_per_rank: ",
        "2 with one_f_one_b: interleaved takes 2 or more, zbv 2, the others 1",
    ),
    "one stage a rank, interleaved": (
        "pipeline_schedule: interleaved\nstages_per_rank: 1\n",
        "x.yaml:2: stages_per_rank: ",
        "1 with interleaved",
    ),
    "micro-batches that rounds do not share": (
        "pipeline_schedule: interleaved\npipeline_parallel_size: 2\ngradient_accumulation: 5\n",
        "x.yaml:1: pipeline_schedule: ",
        "the nearest numbers that work are 4 and 6",
    ),
    "a backward apart under ZeRO": (
        "zero_stage: 1\npipeline_schedule: zb_h1\n",
        "x.yaml:2: pipeline_schedule: ",
        "zb_h1 takes the backward apart, and what zero_stage 1 puts around the weights",
    ),
    "a backward apart under mixed precision": (
        "precision: bfloat16\npipeline_schedule: zb_h1\n",
        "x.yaml:2: pipeline_schedule: ",
        "what precision bfloat16 puts around the weights allows it only whole",
    ),
    "a tied weight in two ZeROs": (
        "pipeline_parallel_size: 2\nzero_stage: 1\n",
        "x.yaml:2: zero_stage: ",
        "zero_stage 1 would cut it differently in each: give model.tied: false, or zero_stage: 0",
    ),
    "a tied weight twice on a rank": (
        "pipeline_parallel_size: 2\npipeline_schedule: zbv\nmodel:\n  tied: true\n",
        "x.yaml:4: model.tied: ",
        "zbv on 2 ranks has the first stage and the last on one rank",
    ),
    "fewer ranks than GPUs": (
        "data_parallel_size: 4\ncluster: dgx-h100\n",
        "x.yaml:2: cluster: ",
        "2 nodes x 8 = 16 GPUs, but tensor_parallel_size 1 x pipeline_parallel_size 1 x "
        "data_parallel_size 4 = 4 ranks: make them equal, 2 GPUs in each of the 2 nodes say",
    ),
    "more ranks than GPUs": (
        "data_parallel_size: 8\ncluster:\n  nodes: 3\n  gpus_per_node: 2\n",
        "x.yaml:4: cluster.gpus_per_node: ",
        "3 nodes x 2 = 6 GPUs",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_wrong_is_told_once_with_its_line_and_key(name, refused):
    text, where, words = BROKEN[name]
    lines = refused(text)
    assert len(lines) == 1, lines
    assert lines[0].startswith(where), lines[0]
    assert words in lines[0], lines[0]
    assert "pydantic" not in lines[0] and "http" not in lines[0] and "Input" not in lines[0]
    assert os.listdir() == ["x.yaml"]


def test_all_problems_of_a_file_are_told_in_its_order(refused):
    lines = refused(
        "seed: -1\nhybrid_shard_size: 2\ndata_parallel_size: 2\nsteps: 5\nsteps: 6\n"
        "model:\n  layers: x\n  hiden: 3\noptimizer: !!x {lr: 1}\n"
    )
    starts = ["1: seed", "2: hybrid_shard_size", "5: steps", "7: model.layers", "8: model.hiden"]
    starts.append("9: optimizer: the tag")
    assert len(lines) == len(starts), lines
    for line, start in zip(lines, starts, strict=True):
        assert line.startswith(f"x.yaml:{start}"), line


def test_of_very_many_problems_the_first_are_told(refused):
    lines = refused("".join(f"key{i}: 5\n" for i in range(300)))
    assert len(lines) == 21 and lines[-1] == "x.yaml: and 280 problems more"


def test_aliases_that_multiply_cost_nothing(refused):
    names = "abcdefghijklm"
    nines = {name: ",".join([f"*{name}"] * 9) for name in names}
    lists = ["a: &a [x]\n"] + [
        f"{b}: &{b} [{nines[a]}]\n" for a, b in zip(names, names[1:], strict=False)
    ]
    assert len(refused("".join(lists))) == 13
    maps = ["a: &a {steps: 5}\n"] + [
        f"{b}: &{b} {{<<: [{nines[a]}]}}\n" for a, b in zip(names, names[1:], strict=False)
    ]
    assert len(refused("".join(maps))) == 13
    deep = "model: {layers: &a [x]}\n" + "".join(
        f"{b}: &{b} [{nines[a]}]\n" for a, b in zip(names, names[1:], strict=False)
    )
    assert refused(deep + f"optimizer: {{lr: *{names[-1]}}}\n")[-1].endswith("number from 0 to 100")


@pytest.mark.parametrize(
    "path, words",
    [
        ("no.yaml", "no.yaml: no such file (looked from"),
        ("dpd.yaml", "did you mean ddp.yaml?"),
        (".", ".: a folder"),
        ("ddp.yaml/x", "cannot be read: Not a directory"),
        ("a\0b", r"a\x00b: cannot be read"),
        ("x" * 5000, "cannot be read: File name too long"),
    ],
)
def test_what_is_no_file_is_refused(path, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("ddp.yaml").write_text("steps: 5\n")
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert words in str(error.value)


def test_what_may_not_be_read_is_refused(tmp_path, monkeypatch):
    def denied(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", denied)
    with pytest.raises(ConfigError, match="x.yaml: cannot be read: Permission denied"):
        load_config("x.yaml")


def test_a_mutated_file_loads_or_is_refused(load):
    draw = random.Random(0)
    base = yaml.safe_dump(load("steps: 5\ncluster: {nodes: 1, gpus_per_node: 1}\n").model_dump())
    loaded = 0
    for _ in range(300):
        letters = list(base)
        for _ in range(draw.randint(1, 3)):
            place, many = draw.randrange(len(letters)), draw.choice([0, 0, 1, 1, 20])
            letters[place : place + many] = draw.choice(
                "{}[]:,-&*!|>'\"%@ \n\t#?01e.x~<\\\x85\ufeff"
            )
        try:
            loaded += bool(load("".join(letters)))
        except ConfigError:
            pass
    assert 0 < loaded < 300


# What is fine.


def test_what_is_left_out_has_its_default(load):
    config = load("steps: 3\n")
    assert (config.ranks, config.steps, config.seed, config.output) == (1, 3, 0, "runs/x")
    assert config.gpt() == GPTConfig.tiny() and config.cluster_object() is None
    assert (config.stages, config.micro_batches, config.schedule().name) == (1, 1, "1F1B")
    assert load("model: {size: small, tied: false}\n").gpt() == GPTConfig.small(tied=False)


def test_an_empty_section_is_one_left_out(load):
    assert load("model:\n  # layers: 2\noptimizer:\nsteps: 5\n") == load("steps: 5\n")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_what_a_config_dumps_loads_as_the_same(path, tmp_path):
    config = load_config(path)
    again = tmp_path / "again.yaml"
    again.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert load_config(again) == config
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_of_ours_says_what_it_shows_and_multiplies_to_its_ranks(path):
    assert path.read_text().startswith("# ")
    config = load_config(path)
    sizes = config.data_parallel_size, config.pipeline_parallel_size, config.tensor_parallel_size
    assert config.ranks == config.islands * sizes[0] * sizes[1] * sizes[2]
    replicas = config.islands * config.data_parallel_size
    batch = config.micro_batch_size * config.gradient_accumulation * replicas
    assert config.global_batch == batch
    schedule = config.schedule()
    assert (len(schedule.ranks), schedule.stages) == (config.pipeline_parallel_size, config.stages)
    assert schedule.microbatches == config.micro_batches
    assert config.cluster_object() is None or config.cluster_object().size == config.ranks


def test_there_is_a_config_for_each_strategy_and_combination():
    names = "one_process ddp zero1 zero2 zero3 hybrid mixed_precision pipeline_gpipe pipeline_1f1b"
    names += " pipeline_interleaved zero_bubble tensor sequence dp_tp dp_pp zero_tp three_d"
    names += " three_d_zero slow_nodes dropout field_guide"
    assert {*names.split()} <= {path.stem for path in CONFIGS}


def test_the_field_guide_is_two_four_eight():
    [path] = [path for path in CONFIGS if path.stem == "field_guide"]
    config = load_config(path)
    assert (config.tensor_parallel_size, config.pipeline_parallel_size) == (2, 4)
    assert (config.data_parallel_size, config.ranks) == (8, 64)
    assert config.gpt() == GPTConfig.small() and config.steps == 5


@pytest.mark.parametrize(
    "text, want",
    [
        ("", (6, 1, 3)),
        ("global_batch: 24", (24, 4, 3)),
        ("micro_batch_size: 2", (12, 2, 3)),
        ("gradient_accumulation: 6", (12, 1, 6)),
        ("global_batch: 24\nmicro_batch_size: 1", (24, 1, 12)),
        ("global_batch: 24\ngradient_accumulation: 4", (24, 3, 4)),
        ("micro_batch_size: 5\ngradient_accumulation: 4", (40, 5, 4)),
        ("global_batch: 40\nmicro_batch_size: 5\ngradient_accumulation: 4", (40, 5, 4)),
        ("global_batch: null\nmicro_batch_size: 2", (12, 2, 3)),
    ],
)
def test_the_numbers_of_a_batch_follow_from_those_given(text, want, load):
    config = load(f"data_parallel_size: 2\npipeline_parallel_size: 3\n{text}\n")
    assert (config.global_batch, config.micro_batch_size, config.gradient_accumulation) == want


@pytest.mark.parametrize("written", ["1e-3", "+1E-03", "1.0e-3", "0.001"])
def test_a_number_is_taken_as_everybody_writes_it(written, load):
    assert load(f"optimizer: {{lr: {written}}}\n").optimizer.lr == 1e-3


def test_whole_numbers_stand_for_others_and_quotes_make_text(load, refused):
    assert load("optimizer: {lr: 1, clip: 2}\n").optimizer.clip == 2.0
    assert "the text '1e-3'" in refused("optimizer: {lr: '1e-3'}\n")[0]
    assert load("output: '1e-3'\n").output == "1e-3"
    assert load("output: 2020-01-01\nseed: 1_000\n").output == "2020-01-01"


def test_a_byte_order_mark_and_windows_lines_change_nothing(load, refused):
    assert load(b"\xef\xbb\xbfsteps: 7\r\nseed: 3\r\n") == load("steps: 7\nseed: 3\n")
    assert refused(b"\xef\xbb\xbfsteps: 7\r\nseed: x\r\n")[0].startswith("x.yaml:2: seed: ")


def test_anchors_and_merges_are_what_they_stand_for(load, refused):
    text = "data_parallel_size: 2\ncluster:\n  nodes: 2\n  gpus_per_node: 1\n"
    text += "  intra: &l\n    gbit_s: 5\n    latency_us: 1\n"
    config = load(text + "  inter: {<<: *l, latency_us: 50}\n")
    assert (config.cluster.inter.gbit_s, config.cluster.inter.latency_us) == (5, 50)
    assert load(text + "  inter: *l\n").cluster.inter == config.cluster.intra
    # What is merged is told where it is written.
    lines = refused(text.replace("gbit_s: 5", "gbit_s: 0") + "  inter: {<<: *l}\n")
    assert [line[:30] for line in lines] == [
        f"x.yaml:6: cluster.int{end}" for end in ("ra.gbit_s", "er.gbit_s")
    ]


def test_a_cluster_is_a_preset_or_counts_and_links(load):
    assert (
        load("data_parallel_size: 16\ncluster: dgx-a100\n").cluster_object() == PRESETS["dgx-a100"]
    )
    text = "data_parallel_size: 6\ncluster: {nodes: 3, gpus_per_node: 2, inter: {gbit_s: 1}}\n"
    cluster = load(text).cluster_object()
    assert (cluster.nodes, cluster.size, cluster.intra) == (3, 6, None)
    assert (cluster.inter.gbit_s, cluster.inter.latency_us) == (1, 0)


def test_schedules_have_the_stages_they_are_known_for(load):
    untied = "pipeline_parallel_size: 2\nmodel: {tied: false}\n"
    assert load(untied + "pipeline_schedule: interleaved\n").stages == 4
    assert (
        load(untied + "pipeline_schedule: interleaved\nstages_per_rank: 3\n").schedule().stages == 6
    )
    assert load(untied + "pipeline_schedule: zbv\n").schedule().stages == 4
    assert load(untied + "pipeline_schedule: zb_h1\nactivation_checkpointing: true\n").stages == 2
    assert load(untied + "zero_stage: 3\n").zero_stage == 3


# Overrides.


def test_an_override_takes_the_place_of_what_the_file_says(load):
    text = "steps: 5\nmodel: &m {layers: 2}\noptimizer: {lr: 1}\ncluster: dgx-h100\n"
    config = load(
        text,
        "steps=9",
        "optimizer.lr=1e-2",
        "lr_schedule.name=cosine",
        "mesh_order=[tp, pp, dp]",
        "model={size: small}",
        "cluster=null",
        "optimizer.clip=",
        "steps = 11",
        "output=a=b",
    )
    assert (config.steps, config.optimizer.lr, config.lr_schedule.name) == (11, 0.01, "cosine")
    assert config.mesh_order == ("tp", "pp", "dp") and config.gpt() == GPTConfig.small()
    assert (config.cluster, config.optimizer.clip, config.output) == (None, None, "a=b")


def test_an_override_mends_what_the_file_has_wrong(load):
    assert load("steps: x\n", "steps=5").steps == 5


def test_an_override_inside_an_alias_leaves_the_other_as_it_was(load):
    text = "data_parallel_size: 2\ncluster:\n  nodes: 2\n  gpus_per_node: 1\n"
    config = load(text + "  intra: &l {gbit_s: 5}\n  inter: *l\n", "cluster.inter.gbit_s=1")
    assert (config.cluster.intra.gbit_s, config.cluster.inter.gbit_s) == (5, 1)


@pytest.mark.parametrize(
    "override, told",
    [
        ("steps", "--set steps: give KEY=VALUE"),
        ("=5", "--set =5: give KEY=VALUE"),
        ("a..b=5", "--set a..b=5: give KEY=VALUE"),
        ("steps=x", "--set steps=x: steps: given the text 'x'; wanted a whole number"),
        ("optimizer.lr=-1", "--set optimizer.lr=-1: optimizer.lr: given -1; wanted a number from"),
        ("optimizr.lr=1", "--set optimizr.lr=1: optimizr: no such key; did you mean optimizer?"),
        ("seed.x=1", "--set seed.x=1: seed: has no keys inside, it is a whole number"),
        ("model=[", "--set model=[: this is no YAML"),
        ("st\udce9ps=3", "--set st\\udce9ps=3: half a character where a key belongs"),
        ("model.\udce9=3", "--set model.\\udce9=3: half a character where a key belongs"),
        ("output=r\udce9", "--set output=r\\udce9: the character U+DCE9"),
        (
            "model={layers: 1, layers: 2}",
            "--set model={layers: 1, layers: 2}: model.layers: given t",
        ),
        ("seed=!!python/name:os", "--set seed=!!python/name:os: seed: the tag !!python/name:os"),
        (
            "tensor_parallel_size=3",
            "--set tensor_parallel_size=3: tensor_parallel_size: 3 ranks cann",
        ),
        ("model.heads=3", "--set model.heads=3: model.heads: hidden 64 does not cut into 3 heads"),
    ],
)
def test_an_override_that_is_wrong_is_told_as_it_was_given(override, told, refused):
    lines = refused("steps: 5\nseed: 1\n", override)
    assert len(lines) == 1 and lines[0].startswith(told), lines


def test_a_file_whose_name_is_in_another_encoding_needs_an_output(tmp_path):
    path = tmp_path / "r\udce9.yaml"
    path.write_text("steps: 5\n")
    with pytest.raises(ConfigError, match="output: given the text .*; wanted the path of a folder"):
        load_config(path)
    assert load_config(path, ["output=x"]).steps == 5


# What the strategies take.


def fits(gpt, ranks):
    with torch.device("meta"):
        model = GPT(gpt)
    try:
        check_plan(model, match(model, GPT_PLAN), ranks)
    except ValueError:
        return False
    return True


def test_the_tensor_check_refuses_what_the_strategy_refuses(load):
    shapes = [(6, 6, 48, 256), (6, 3, 48, 256), (8, 4, 36, 5), (4, 4, None, 3), (12, 12, 40, 256)]
    for heads, kv_heads, mlp_hidden, vocab in shapes:
        sizes = {"hidden": 8 * heads, "heads": heads, "kv_heads": kv_heads, "vocab": vocab}
        model = {**sizes, "mlp_hidden": mlp_hidden, "layers": 1}
        right = [n for n in range(1, 13) if fits(GPTConfig(**model), n)]
        taken = []
        for ranks in range(1, 13):
            try:
                taken.append(load(yaml.safe_dump({"tensor_parallel_size": ranks, "model": model})))
            except ConfigError as error:
                said = str(error).split(": ")[-1].removesuffix(" would do")
                assert said.replace(" or ", ", ") == ", ".join(map(str, right))
        assert [config.tensor_parallel_size for config in taken] == right


def test_as_many_stages_are_allowed_as_leave_blocks_whole(load, refused):
    config = load("pipeline_parallel_size: 7\nmodel: {layers: 4}\n")
    with torch.device("meta"):
        stages = split(GPT(config.gpt()), config.stages)
    assert [len(list(stage.parameters())) for stage in stages] == [1, 9, 9, 9, 9, 1, 1]
    assert refused("pipeline_parallel_size: 8\nmodel: {layers: 4}\n")


@pytest.mark.parametrize("vocab", [2, 256, 50_000])
def test_as_many_stages_are_allowed_under_tensor_parallel_as_have_a_layer_to_cut(
    vocab, load, refused
):
    text = f"tensor_parallel_size: 2\nmodel: {{layers: 4, vocab: {vocab}}}\n"
    config = load(text, "pipeline_parallel_size=6")
    with torch.device("meta"):
        stages = split(GPT(config.gpt()), config.stages)
    assert all(any(p.dim() > 1 for p in stage.parameters()) for stage in stages)
    assert (
        "has 6 parts (embedding, blocks, norm and head, with tensor_parallel_size > 1): use "
        in (refused(text, "pipeline_parallel_size=7")[0])
    )


def test_importing_the_configuration_does_not_load_torch():
    program = "import sys, s2s_lib.training.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
