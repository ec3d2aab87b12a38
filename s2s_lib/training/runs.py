"""Where a run keeps what it writes, and what it tells while it goes.

    runs/ddp/log.jsonl        a line of JSON for each step that was logged; "sent" (by class of
                              link) and "sent_along" (by axis) are a step's by all ranks together,
                              on average since the line before; "held" is, of each kind, by the
                              rank that holds most; with islands "loss" is the mean over all,
                              "grad_norm" that of the first
    runs/ddp/config.yaml      the configuration, with everything that was left out
    runs/ddp/checkpoints/     see checkpoint.py
    runs/ddp/report.html      at the end: pictures and numbers (report.py)

A second run without --resume gets a folder of its own, runs/ddp-2: nothing is overwritten. Its
file `.run` says that it is a run of ddp, since a run of another output may be called ddp-2, and a
copy that somebody keeps ddp-20240101. --resume takes the last run that has a checkpoint, and while
a run is alive no other goes on with it (lock.py).
"""

import contextlib
import glob
import json
import os
import re
import sys
import tempfile
from pathlib import Path

from tqdm import tqdm

from s2s_lib.meters.units import human_bytes
from s2s_lib.training.config import Config, ConfigError, load_config
from s2s_lib.training.disk import latest
from s2s_lib.training.yaml_lines import as_yaml
from s2s_lib.training.yaml_text import shown

MARK = ".run"
# The numbers of later runs.
LATER = re.compile("[2-9]|[1-9][0-9]+")


def run_folder(output: str, resume: bool) -> Path:
    """The folder to go on in with `resume`, else a new one, made now: output, output-2, ..."""
    runs = runs_of(output)
    if resume and runs:
        return last_saved(output) or runs[max(runs)]
    number = max(runs, default=0) + 1
    while os.path.lexists(numbered(output, number)):
        number += 1
    # Another run may have had the same idea: then this one stops, and nothing is mixed.
    folder = numbered(output, number)
    folder.mkdir(parents=True)
    (folder / MARK).write_text(mark(folder, Path(output)), encoding="utf-8")
    return folder


def runs_of(output: str) -> dict[int, Path]:
    """The folders output, output-2, ... by number, without those that are not its runs."""
    base, found = Path(output), {}
    if base.is_dir() and not is_later_run(base):
        found[1] = base
    for path in base.parent.glob(f"{glob.escape(base.name)}-*"):
        number = path.name[len(base.name) + 1 :]
        if LATER.fullmatch(number) and read_mark(path) == mark(path, base):
            found[int(number)] = path
    return found


def mark(folder: Path, base: Path) -> str:
    return json.dumps({"folder": folder.name, "run of": base.name})


def read_mark(folder: Path) -> str | None:
    try:
        return (folder / MARK).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None


def is_later_run(folder: Path) -> bool:
    """Whether this is one of another output, as `llama-2` can be of `llama`."""
    name, _, number = folder.name.rpartition("-")
    return bool(LATER.fullmatch(number)) and read_mark(folder) == mark(folder, Path(name))


def last_saved(output: str) -> Path | None:
    """The last run that has a checkpoint: a start that failed at once leaves a folder too."""
    runs = runs_of(output)
    saved = (runs[n] for n in sorted(runs, reverse=True) if latest(runs[n] / "checkpoints"))
    return next(saved, None)


def numbered(output: str, number: int) -> Path:
    base = Path(output)
    return base if number == 1 else base.with_name(f"{base.name}-{number}")


def check_folder(config: Config):
    """ValueError where no run can have a folder, and where the run would be among its own text."""
    base, shown_base = Path(config.output), shown(config.output)
    try:
        if base.name in ("", ".."):
            raise ValueError("it has no name of its own; give one, as in runs/first")
        base.parent.mkdir(parents=True, exist_ok=True)
        # With room for the -2 of a second run.
        os.rmdir(tempfile.mkdtemp(prefix=f"{base.name}-", dir=base.parent))
        refuse_own_text(base.resolve(), config.data.path)
    except (OSError, ValueError) as error:
        raise ValueError(f"output {shown_base}: {error}") from error


def refuse_own_text(folder: Path, source: str | None):
    """ValueError where the files of a run would be read as text to train on."""
    text = Path(source).resolve() if source else None
    if text and text.is_dir() and folder.is_relative_to(text):
        # Names that begin with a dot are left out of a text (course/data.py).
        if not any(part.startswith(".") for part in folder.relative_to(text).parts):
            raise ValueError(
                f"it is inside data.path {source}, and what the run writes would be text to train "
                "on: give an output outside it, or a name that begins with a dot"
            )


def refuse_another_run(config: Config):
    """ValueError, with the keys, where the last run has a checkpoint and cannot go on from it with
    this configuration: another model, other samples, another optimizer."""
    if (folder := last_saved(config.output)) is None:
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
        replace_text(folder / "config.yaml", as_yaml(config.model_dump(mode="json")))
        path = folder / "log.jsonl"
        kept = [json.dumps(entry) + "\n" for entry in read_log(path) if entry["step"] <= first]
        self.steps = config.steps
        # A run that goes on repeats the steps since its checkpoint.
        replace_text(path, "".join(kept))
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


def read_log(path: Path) -> list[dict]:
    """The entries of a log. What is no whole one is left out: a rank that was killed, or a disk
    that was full, may have left half of a line."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        with contextlib.suppress(ValueError):
            entry = json.loads(line)
            if isinstance(entry, dict) and {"step", "loss"} <= entry.keys():
                found.append(entry)
    return found
