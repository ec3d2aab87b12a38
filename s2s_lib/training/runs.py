"""Where a run keeps what it writes, and what it tells while it goes.

    runs/ddp/log.jsonl        a line of JSON for each step that was logged; "sent" is by all ranks
                              together, "held" by the one that holds most
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


def run_folder(output: str, resume: bool) -> Path:
    """The last run's folder with `resume`, else a new one, made now: output, output-2, ..."""
    base = Path(output)
    taken = [1] if base.exists() else []
    for path in base.parent.glob(f"{glob.escape(base.name)}-*"):
        if (number := path.name[len(base.name) + 1 :]).isdecimal():
            taken.append(int(number))
    last = max(taken, default=0)
    if not (resume and taken):
        last += 1
    folder = base if last == 1 else base.with_name(f"{base.name}-{last}")
    # Another run may have had the same idea: then this one stops, and nothing is mixed.
    folder.mkdir(parents=True, exist_ok=resume)
    return folder


class Journal:
    """Written by the first rank: the log, and lines or a bar for people."""

    def __init__(self, folder: Path, config, first: int, bar: bool):
        written = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
        (folder / "config.yaml").write_text(written)
        path = folder / "log.jsonl"
        kept = [line for line in read_lines(path) if json.loads(line)["step"] <= first]
        self.steps = config.steps
        # A run that goes on repeats the steps since its checkpoint. The log is there all the time.
        new = path.with_suffix(".tmp")
        new.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        os.replace(new, path)
        self.file = path.open("a", encoding="utf-8")
        self.bar = (
            tqdm(total=self.steps, initial=first, ncols=100, file=sys.stderr) if bar else None
        )
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
    links = [(link + " ", n) if link != "wire" else ("", n) for link, n in entry["sent"].items()]
    sent = " ".join(f"{link}{human_bytes(n)}" for link, n in links)
    return "  ".join(
        [
            f"loss {entry['loss']:.4f}",
            f"norm {entry['grad_norm']:.3f}",
            f"lr {entry['lr']:.2e}",
            f"{entry['tokens_per_second']:,.0f} tokens/s",
            f"sent {sent or '0 B'}",
            f"held {human_bytes(entry['held_total'])}",
        ]
    )


def read_lines(path: Path) -> list[str]:
    """The whole lines of a log; a rank that was killed may have left half of one."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [line for line in lines[:-1] if line]
