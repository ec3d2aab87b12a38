"""`python -m s2s_lib train CONFIG`: a training run from one file.

    s2s train configs/ddp.yaml                       starts the ranks that the file asks for
    s2s train configs/ddp.yaml --resume              goes on from the last checkpoint
    s2s train configs/ddp.yaml --set optimizer.lr=3e-4 --steps 100
    torchrun --nproc-per-node 4 -m s2s_lib train configs/ddp.yaml --resume
    s2s export runs/ddp/checkpoints weights.safetensors

Ends with 0; with 1 where a rank failed, whose name and error are told; with 2 where the file or the
arguments are wrong, which is told before any rank is started. Ranks compute on CPUs.
"""

import argparse
import os
import sys
from pathlib import Path


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(prog="s2s", description="Training from one YAML file.")
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="train as a YAML file says")
    train.add_argument("config", help="a file such as configs/ddp.yaml")
    train.add_argument(
        "--resume",
        action="store_true",
        help="go on from the last checkpoint of the last run that has one",
    )
    train.add_argument("--steps", type=int, help="train up to this step")
    train.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="instead of the file's"
    )
    train.add_argument(
        "--timeout",
        type=float,
        default=300,
        help="seconds that a message, or a rank's part of a save, may take (300)",
    )
    export = commands.add_parser("export", help="a checkpoint as one plain file of weights")
    export.add_argument("checkpoints", help="a run's folder, that of its checkpoints, or of one")
    export.add_argument("file", help="the .safetensors file to write")
    given = parser.parse_args(arguments)
    return run_train(given) if given.command == "train" else run_export(given)


def run_train(given) -> int:
    from s2s_lib.training.config import ConfigError, load_config

    changes = list(given.set)
    if given.steps is not None:
        changes.append(f"steps={given.steps}")
    try:
        config = load_config(given.config, changes)
    except ConfigError as error:
        return refuse(error)
    from s2s_lib.ranks.failure import RankError
    from s2s_lib.ranks.launch import check_timeout, launch
    from s2s_lib.training.runs import check_folder, refuse_another_run
    from s2s_lib.training.train import look, train

    cluster, bar = config.cluster_object(), sys.stderr.isatty()
    try:
        check_timeout(given.timeout)
        check_ranks(config)
        look(config)
        check_folder(config)
        if given.resume:
            refuse_another_run(config)
    except ValueError as error:
        return refuse(error)
    try:
        runs = launch(
            train,
            config,
            given.resume,
            bar,
            ranks=config.ranks,
            cluster=cluster,
            timeout=given.timeout,
        )
    except RankError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; --resume goes on from the last checkpoint", file=sys.stderr)
        return 130
    if is_first():
        finish(config, runs)
    return 0


def check_ranks(config):
    """ValueError unless there are, or can be started, as many ranks as the file asks for."""
    from s2s_lib.ranks.launch import MOST_RANKS, under_torchrun

    asked = (
        f"data_parallel_size {config.data_parallel_size} x pipeline_parallel_size "
        f"{config.pipeline_parallel_size} x tensor_parallel_size {config.tensor_parallel_size}"
        + (f" x diloco.islands {config.islands}" if config.diloco else "")
        + f" = {config.ranks} ranks"
    )
    if under_torchrun():
        there = int(os.environ["WORLD_SIZE"])
        if there != config.ranks:
            raise ValueError(f"{asked}, and torchrun has started {there}: make them equal")
    elif config.ranks > MOST_RANKS:
        raise ValueError(
            f"{asked}, and this machine starts at most {MOST_RANKS} processes: use torchrun on "
            "several machines, or smaller sizes"
        )


def refuse(error) -> int:
    """Tell what is wrong; under torchrun, where all are told the same, once."""
    if os.environ.get("RANK", "0") == "0":
        print(f"{error}", file=sys.stderr)
    return 2


def is_first() -> bool:
    """Whether this process is to tell how the run ended: under torchrun only one of them is."""
    import torch.distributed as dist

    return not dist.is_initialized() or dist.get_rank() == 0


def finish(config, runs):
    """Write the report; say in a line how the run ended."""
    from s2s_lib.training.report import summary, write_report
    from s2s_lib.training.runs import read_log

    folder = Path(runs[0].folder)
    log = read_log(folder / "log.jsonl")
    if not runs[0].log:
        asked = f"no further than step {config.steps} was asked for"
        print(f"{folder} is at step {runs[0].first}, and {asked}: --steps takes it further")
        return
    print(summary(config, runs[0], log[-1]))
    print(f"report: {write_report(config, runs, log)}")


def run_export(given) -> int:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    from s2s_lib.training.checkpoint import export

    if not given.file.endswith(".safetensors"):
        return refuse(f"{given.file}: what is written is safetensors; give a name with that ending")
    inside = Path(given.checkpoints) / "checkpoints"
    try:
        weights = export(inside if inside.is_dir() else given.checkpoints)
        # Tied weights are one memory under two names, which the format does not take.
        save_file({name: tensor.clone() for name, tensor in weights.items()}, given.file)
    except (ValueError, OSError, SafetensorError) as error:
        return refuse(error)
    print(f"{given.file}: {len(weights)} tensors")
    return 0
