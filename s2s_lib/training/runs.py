"""Where a run keeps what it writes, and what it tells while it goes.

    runs/ddp/log.jsonl        a line of JSON for each step that was logged; "sent" (by class of
                              link) and "sent_along" (by axis) are by all ranks together, "held"
                              is, of each kind, by the rank that holds most
    runs/ddp/config.yaml      the configuration, with everything that was left out
    runs/ddp/checkpoints/     see checkpoint.py
    runs/ddp/report.html      at the end: pictures and numbers (report.py)

A second run without --resume gets a folder of its own, runs/ddp-2: nothing is overwritten.
"""

import glob
import json
import os
import sys
from pathlib import Path

import yaml
from tqdm import tqdm

from s2s_lib.meters.units import human_bytes
from s2s_lib.training.config import Config, ConfigError, load_config
from s2s_lib.training.disk import latest


def run_folder(output: str, resume: bool) -> Path:
    """The last run's folder with `resume`, else a new one, made now: output, output-2, ..."""
    last = last_run(output)
    folder = numbered(output, max(last, 1) if resume else last + 1)
    # Another run may have had the same idea: then this one stops, and nothing is mixed.
    folder.mkdir(parents=True, exist_ok=resume)
    return folder


def last_run(output: str) -> int:
    """The number of the last run in `output`, output-2, ...; 0 where there is none."""
    base = Path(output)
    taken = [1] if base.exists() else []
    for path in base.parent.glob(f"{glob.escape(base.name)}-*"):
        if (number := path.name[len(base.name) + 1 :]).isdecimal():
            taken.append(int(number))
    return max(taken, default=0)


def numbered(output: str, number: int) -> Path:
    base = Path(output)
    return base if number == 1 else base.with_name(f"{base.name}-{number}")


def refuse_another_run(config: Config):
    """ValueError, with the keys, where the last run has a checkpoint and cannot go on from it with
    this configuration: another model, other samples, another optimizer."""
    folder = numbered(config.output, max(last_run(config.output), 1))
    if latest(folder / "checkpoints") is None:
        return
    try:
        before = load_config(folder / "config.yaml")
    except ConfigError:
        # It is lost, or written by other hands. What does not fit is found in the checkpoint then.
        return
    was, now = what_stays(before), what_stays(config)
    if changed := [
        f"{key} was {was[key]} and is {now[key]}" for key in was if was[key] != now[key]
    ]:
        raise ValueError(
            f"the run in {folder} cannot go on so: {', '.join(changed)}. Give what it was, or "
            "begin a new run without --resume"
        )


def what_stays(config: Config) -> dict:
    """The keys, with what they mean, that are the same from the first step of a run to the last."""
    model = config.gpt()
    # What is dropped may change; what is left out follows from other sizes; mixed precision has the
    # weights of float32.
    sizes = {f"model.{key}": value for key, value in vars(model).items() if key != "dropout"}
    sizes["model.kv_heads"] = model.kv_heads or model.heads
    sizes["model.mlp_hidden"] = model.mlp_hidden or "8/3 of model.hidden"
    sizes["precision"] = "float64" if config.precision == "float64" else "float32 or bfloat16"
    return {"seed": config.seed, **sizes, "optimizer.name": config.optimizer.name}


class Journal:
    """Written by the first rank: the log, and lines or a bar for people."""

    def __init__(self, folder: Path, config, first: int, bar: bool):
        written = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
        replace_text(folder / "config.yaml", written)
        path = folder / "log.jsonl"
        kept = [line for line in read_lines(path) if json.loads(line)["step"] <= first]
        self.steps = config.steps
        # A run that goes on repeats the steps since its checkpoint.
        replace_text(path, "".join(line + "\n" for line in kept))
        self.file = path.open("a", encoding="utf-8")
        form = "{n}/{total} |{bar:8}| {remaining} left{postfix}"
        options = {"bar_format": form, "dynamic_ncols": True, "file": sys.stderr}
        self.bar = tqdm(total=self.steps, initial=first, **options) if bar else None
        begins = f"goes on after step {first}" if first else "begins"
        self.say(f"{folder}: {begins}, ranks {config.ranks}, steps {config.steps}")

    def say(self, words):
        if self.bar is None:
            print(words, flush=True)
        else:
            self.bar.write(words, file=sys.stderr)

    def write(self, entry: dict):
        self.file.write(json.dumps(entry) + "\n")
        self.file.flush()
        if self.bar is None:
            self.say(f"step {entry['step']:>4}/{self.steps}  {in_words(entry)}")
        else:
            self.bar.set_postfix_str(in_words(entry), refresh=False)
            self.bar.update(entry["step"] - self.bar.n)

    def close(self):
        self.file.close()
        if self.bar is not None:
            self.bar.close()


def in_words(entry: dict) -> str:
    """For people: "sent" is by all ranks together, what is held is that of the fullest rank."""
    links = [(link + " ", n) if link != "wire" else ("", n) for link, n in entry["sent"].items()]
    sent = " ".join(f"{link}{human_bytes(n)}" for link, n in links)
    return "  ".join(
        [
            f"loss {entry['loss']:.4f}",
            f"norm {entry['grad_norm']:.3f}",
            f"lr {entry['lr']:.2e}",
            f"{entry['tokens_per_second']:,.0f} tokens/s",
            f"all sent {sent or '0 B'}",
            f"the fullest holds {human_bytes(entry['held_total'])}",
        ]
    )


def replace_text(path: Path, text: str):
    """Write a file that is there all the time, as it was or as it is to be."""
    new = path.with_name(f"{path.name}.tmp")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)


def read_lines(path: Path) -> list[str]:
    """The whole lines of a log; a rank that was killed may have left half of one."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [line for line in lines[:-1] if line]
