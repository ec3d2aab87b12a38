"""Token generation through a pipeline, for several requests at once.

A request's next token needs the one before it, so alone it keeps one rank busy at a time. As many
requests as ranks keep all of them busy: while one is in the last stage, the next is in the one
before. That order is `schedule.streaming`, forwards alone, in which what comes out of the last
stage goes into the first again.

The plain GPT keeps nothing between tokens, so each forward reads its whole row again; a server
would keep keys and values, and send one token's activations.
"""

import hashlib
from collections.abc import Callable, Sequence

import torch

from s2s_lib.collectives.functions import broadcast
from s2s_lib.ranks.connection import current
from s2s_lib.strategies.pipeline import schedule, values
from s2s_lib.strategies.pipeline.batch import told_where
from s2s_lib.strategies.pipeline.mail import Mail, walk
from s2s_lib.strategies.pipeline.order import before
from s2s_lib.strategies.pipeline.program import program
from s2s_lib.strategies.pipeline.run import Pipeline
from s2s_lib.strategies.replicas import exchange


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The likeliest token of each row of [B, V], as [B]; of equal ones the first."""
    return logits.argmax(dim=-1)


@torch.no_grad()
def generate(
    pipeline: Pipeline,
    prompts: Sequence[torch.Tensor],
    tokens: int,
    pick: Callable[[torch.Tensor], torch.Tensor] = greedy,
) -> list[torch.Tensor]:
    """`tokens` new tokens for each prompt; on every rank, a tensor [tokens] for each.

    `prompts` are rows of tokens [T], of any lengths, the same list on every rank; `pick` chooses a
    token from logits [1, V]. The stages, one a rank, together map tokens [1, T] to logits
    [1, T, V]. Each forward's activations are sent on, described each time, and each new token to
    the first rank; at the end all tokens go to every rank. ValueError on all ranks unless all give
    the same prompts and `tokens`.
    """
    group = pipeline.group
    if pipeline.schedule.rank_of != tuple(range(group.size)):
        raise ValueError(
            f"generate streams through one stage a rank, here are {pipeline.schedule.stages} "
            f"stages on {group.size} ranks, stage by stage on {list(pipeline.schedule.rank_of)}: "
            "build a Pipeline with schedule.forward_only"
        )
    if not len(prompts) or any(prompt.dim() != 1 or not len(prompt) for prompt in prompts):
        raise ValueError("prompts: give at least one row of tokens [T], each with a token or more")
    mine = repr([tokens, [(str(p.dtype), p.tolist()) for p in prompts]]).encode()
    said = exchange(hashlib.sha256(mine).digest() + bytes([current().given_up % 256]), group)
    if len({words[:-1] for words in said}) > 1:
        raise ValueError("generate: the ranks give different prompts or numbers of tokens")
    mail = Mail(group, None, failures=sum(words[-1] for words in said))
    try:
        return stream(pipeline, prompts, tokens, pick, mail)
    except BaseException:
        mail.give_up()
        raise


def stream(pipeline, prompts, tokens, pick, mail):
    """Walk through the program of a streaming schedule."""
    group = pipeline.group
    pipeline.accelerator.begin()
    order = schedule.streaming(group.size, len(prompts), tokens)
    first, last = group.rank == 0, group.rank == group.size - 1
    rows = [prompt[None] for prompt in prompts]
    chosen = [[] for _ in prompts]
    here = {}
    for action in walk(program(order, group.rank), mail, here, pipeline.accelerator.wait):
        needed, request = before(action, order), action.micro % len(prompts)
        value = values.build(*here.pop(needed)) if needed else None
        if first:
            if value is not None:
                rows[request] = torch.cat([rows[request], value], dim=1)
            value = rows[request]
        with pipeline.accelerator.pace(action), told_where(action):
            value = pipeline.stages[0](value)
        if last:
            value = pick(value[:, -1])[:, None].to(rows[request].dtype)
            chosen[request].append(value)
        here[action] = values.flatten(value, f"stage {group.rank}")
    result = torch.zeros(len(prompts), tokens, dtype=rows[0].dtype)
    if last:
        result = torch.cat([torch.cat(row, dim=1) for row in chosen])
    return list(broadcast(result, group, root=group.size - 1))
