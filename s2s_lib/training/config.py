"""What to train and over how many ranks: a YAML file, checked before anything is started.

    tensor_parallel_size: 2
    pipeline_parallel_size: 4
    data_parallel_size: 8

is a whole configuration, of 64 ranks; keys.py has the other keys and their defaults. What is wrong
is told all at once, with the line, the key, what is there and what would do:

    configs/mine.yaml:7: optimizer.lr: given the text 'abc'; wanted a number from 0 to 100
"""

from pathlib import Path

from pydantic import ValidationError

from s2s_lib.training.checks import check, stages_allowed, with_batch
from s2s_lib.training.explain import explain, lines_of, section, unless_told
from s2s_lib.training.keys import ClusterKeys, Config, Diloco, Log
from s2s_lib.training.yaml_lines import Map, Problem, read_file
from s2s_lib.training.yaml_text import ConfigError

__all__ = ["Config", "ConfigError", "load_config"]


def load_config(path, overrides=()) -> Config:
    """The Config of a YAML file, with `overrides` such as "optimizer.lr=0.01" in place of what it
    says: a dotted key and a value in YAML.

    ConfigError with all that is wrong, a line for each problem, in the order of the file.
    """
    document = read_file(path)
    for order, override in enumerate(overrides):
        document.override(override, 10**9 + order)
    values = {k: v for k, v in document.values.items() if not is_empty_section(k, v)}
    values.setdefault("output", f"runs/{Path(path).stem}")
    problems = document.problems
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        problems = problems + explain(error, Config, document)
        config = without(values, problems)
    if config is not None:
        config, more = settled(config)
        problems = [*problems, *unless_told(more, problems)]
    if problems:
        raise ConfigError("\n".join(lines_of(problems, document, path)))
    return config


def is_empty_section(key, value) -> bool:
    """`model:` with nothing below it, or with comments only."""
    return value is None and section(Config, [key]) not in (None, ClusterKeys, Diloco)


def settled(config) -> tuple[Config, list[Problem]]:
    """The config with the numbers that follow from others, and what does not fit together."""
    if config.diloco and "every" not in config.log.model_fields_set:
        # A line each step would have the islands wait for each other in each step.
        config = config.model_copy(update={"log": Log(every=config.diloco.sync_every)})
    per_rank = config.stages_per_rank or stages_allowed(config)[0]
    config = config.model_copy(update={"stages_per_rank": per_rank})
    batch, problems = with_batch(config)
    config = config.model_copy(update=batch)
    return config, [*problems, *check(config)]


def without(values, problems) -> Config | None:
    """The config as if the keys with problems had been left out; None if that is none."""
    values = {k: value.copy() if isinstance(value, Map) else value for k, value in values.items()}
    for key in (key for problem in problems for key in problem.keys):
        top, _, inside = key.partition(".")
        if isinstance(values.get(top), Map) and inside in values[top]:
            del values[top][inside]
        else:
            values.pop(top, None)
    try:
        return Config.model_validate({"output": "-"} | values)
    except ValidationError:
        return None
