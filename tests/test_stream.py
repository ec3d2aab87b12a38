"""Tokens generated through a pipeline are those of one process, and come as fast as it says.

A request whose tokens went to another one, a token left out of its row, or a rank that waits for a
request while others are ready: each fails here.
"""

import pytest
import torch

from s2s_lib import (
    GPU,
    Cluster,
    Pipeline,
    RankError,
    bill,
    generate,
    launch,
    measured,
    schedule,
    simulate,
    split,
    timeline,
)
from s2s_lib.course.reference import tiny_gpt


def alone(model, prompt, tokens, pick):
    row = prompt[None]
    for _ in range(tokens):
        row = torch.cat([row, pick(model(row)[:, -1])[:, None]], dim=1)
    return row[0, len(prompt) :]


def second_best(logits):
    return logits.topk(2, dim=-1).indices[:, 1]


def prompts_of(lengths):
    return [torch.arange(3, 3 + length) * 7 % 256 for length in lengths]


def stream(world, lengths, tokens, pick):
    model = tiny_gpt().eval()
    pipeline = Pipeline(split(model, world.size), world, schedule.forward_only(world.size, 1))
    prompts = prompts_of(lengths)
    with bill() as sent:
        got = generate(pipeline, prompts, tokens, pick)
    with torch.no_grad():
        want = [alone(model, prompt, tokens, pick) for prompt in prompts]
    assert [row.tolist() for row in got] == [row.tolist() for row in want]
    return sent.by("collective").get("activations", 0)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_request_gets_the_tokens_of_one_process_on_every_rank(ranks):
    for lengths in ([5], [1, 9, 4], [2, 3, 2, 8, 6]):
        launch(stream, lengths, 4, second_best, ranks=ranks)


def test_a_rank_sends_the_rows_activations_and_the_last_the_tokens():
    first, second, last = launch(stream, [5, 3], 4, second_best, ranks=3)
    rows = sum(length + token for length in (5, 3) for token in range(4))
    assert first == second == rows * 64 * 8
    assert last == 2 * 3 * 8


def nothing(world, prompts, stages):
    order = schedule.forward_only(world.size, 1)
    if stages != world.size:
        order = schedule.interleaved(world.size, 2, stages // world.size)
    return generate(Pipeline(split(tiny_gpt(), stages), world, order), prompts, 2)


@pytest.mark.parametrize(
    ("prompts", "stages", "told"),
    [
        ([], 2, "at least one row of tokens"),
        ([torch.zeros(0, dtype=torch.int64)], 2, "at least one row of tokens"),
        ([torch.zeros(1, 3, dtype=torch.int64)], 2, "at least one row of tokens"),
        (prompts_of([3]), 4, "one stage a rank, here are 4 stages on 2 ranks"),
    ],
)
def test_what_cannot_be_streamed_is_refused(prompts, stages, told):
    with pytest.raises(RankError, match=told):
        launch(nothing, prompts, stages, ranks=2)


@pytest.mark.parametrize(("P", "R", "T"), [(4, 4, 8), (4, 9, 3), (4, 2, 8), (4, 1, 5), (1, 3, 2)])
def test_streaming_takes_a_slot_a_token_where_there_are_requests_enough(P, R, T):
    table = simulate(schedule.streaming(P, R, T), 1)
    assert table.total == (R * T + P - 1 if R >= P else T * P + R - 1)
    assert table.busy == [R * T] * P


def timed(world, lengths, tokens):
    pipeline = Pipeline(split(tiny_gpt(), world.size), world, schedule.forward_only(world.size, 1))
    generate(pipeline, prompts_of(lengths), 1)
    # The last stage has fewer layers than the others; here all are to take the same.
    pipeline.accelerator.seconds = {(world.rank, "F"): 0.02}
    with timeline() as line:
        generate(pipeline, prompts_of(lengths), tokens)
    return line


def test_four_requests_on_four_ranks_come_nearly_four_times_as_fast_as_one_after_the_other():
    toy = Cluster(1, 4, gpu=GPU("toy", 1, 1e-3))
    tables = {}
    for requests in (1, 4):
        lines = launch(timed, [3] * requests, 3, ranks=4, cluster=toy)
        tables[requests] = measured(schedule.streaming(4, requests, 3), lines)
    gain = 4 * tables[1].total / tables[4].total
    # 4 x 12 slots one after the other, 15 streamed.
    assert 2.5 < gain < 3.6
