"""What half-right answers to the exercises of lesson 05 give, and the half that is missing."""

from itertools import product

import torch

from s2s_lib.course.model import GPTConfig

PREDICTED = GPTConfig(layers=3, hidden=48, heads=12, kv_heads=4, mlp_hidden=160, tied=False)
ROWS, TOKENS = 8, 16


def of_ranks(ranks) -> str:
    shared = {
        "query heads": PREDICTED.heads,
        "key-value heads": PREDICTED.kv_heads,
        "numbers inside the MLP": PREDICTED.mlp_hidden,
    }
    if ranks not in range(1, PREDICTED.vocab):
        return ""
    uneven = [f"{size} {what}" for what, size in shared.items() if size % ranks]
    if uneven:
        return f"{ranks} ranks cannot have equal shares of {' nor of '.join(uneven)}"
    return "more ranks can have equal shares of everything"


def of_sums(sums) -> str:
    layers = PREDICTED.layers
    return {
        layers: "in a layer attention and MLP each owe a sum",
        2 * layers: "the embedding, whose vocabulary is cut, owes a sum too",
        2 * layers + 2: "logits stay cut, so the head owes none",
        4 * layers: "count those of forward alone, and that of the embedding",
        4 * layers + 2: "count those of forward alone",
    }.get(sums, "")


def of_bytes(sent) -> str:
    in_layers, activation = 4 * PREDICTED.layers, 4 * ROWS * TOKENS * PREDICTED.hidden
    backward = "backward adds up as many activations as forward"
    vocabulary = "the vocabulary has two sums too, of the embedding and of the head's input"
    numbers = {
        in_layers + 2: [],
        in_layers + 1: [vocabulary],
        in_layers: [vocabulary],
        in_layers // 2 + 1: [backward],
        in_layers // 2: [backward, vocabulary],
    }
    times = {
        1: [],
        1 / 4: ["a number in float32 has 4 bytes"],
        2: ["each rank sends 2(W-1)/W of a tensor for its sum, and 4 bytes a number"],
    }
    for factor, number in product(times, numbers):
        if sent == factor * number * activation:
            return "; ".join(numbers[number] + times[factor])
    return ""


def of_rows(weight, right, sizes, ranks) -> dict[str, torch.Tensor]:
    """What is wrong -> the rows that rank 0 then has; `right` are the right ones."""
    return {
        "these rows are cut straight through the blocks": weight[: len(weight) // ranks],
        "these are the rows of the first block alone": right[: sizes[0] // ranks],
        "they are not next to each other; in each block rank r has the r-th piece": torch.cat(
            [block[::ranks] for block in weight.split(sizes)]
        ),
    }


def of_loss(logits_NV, targets_N, size) -> list[tuple[str, torch.Tensor]]:
    """What is missing, and the loss that rank 0 then has. (P counts the ranks.)"""
    parts_PNw = torch.stack(logits_NV.chunk(size, 1))
    width = parts_PNw.shape[2]
    local_PN = targets_N - width * torch.arange(size)[:, None]
    mine_PN = (local_PN >= 0) & (local_PN < width)
    top_N = logits_NV.amax(1)

    def terms(top, column_PN=local_PN, counted=mine_PN):
        z_PNw = parts_PNw - top
        picked_PN1 = z_PNw.gather(2, column_PN.clamp(0, width - 1)[:, :, None])
        return z_PNw.exp().sum(2), picked_PN1[:, :, 0] * counted

    def loss(sum_N, target_N):
        return (sum_N.log() - target_N).mean()

    sum_PN, target_PN = terms(top_N[:, None])
    sum_N, target_N = sum_PN.sum(0), target_PN.sum(0)
    own_top = [term.sum(0) for term in terms(parts_PNw.amax(2, keepdim=True))]
    clamped_N, wrapped_N = (
        terms(top_N[:, None], columns, counted=1)[1].sum(0)
        for columns in (local_PN, local_PN % width)
    )
    no_mask = "a rank that does not have a target must add 0 for it"
    one_top = "both terms need the logits less the largest, not one of them"
    return [
        ("subtract the largest logit of all ranks, not each rank's own", loss(*own_top)),
        (no_mask, loss(sum_N, clamped_N)),
        (no_mask, loss(sum_N, wrapped_N)),
        ("the sum of exp is one rank's; add up over the ranks", loss(sum_PN[0], target_N)),
        ("the target's logit is one rank's; add up over the ranks", loss(sum_N, target_PN[0])),
        ("both terms are one rank's; add up over the ranks", loss(sum_PN[0], target_PN[0])),
        (one_top, loss(sum_N, target_N + top_N)),
        (one_top, loss(sum_N, target_N - top_N)),
        ("it is the sum over tokens; take the mean", len(targets_N) * loss(sum_N, target_N)),
    ]


def of_gradient(softmax, target, size) -> list[tuple[str, torch.Tensor]]:
    """What is wrong, and the gradient then; the right one is softmax - target, one part from the
    sum of exp and one from the target's logit."""
    right = softmax - target
    return [
        (f"it is {size} times the right one: the ranks compute one loss, not {size}", size * right),
        (f"it is the right one divided by {size}", right / size),
        (f"the part of the sum of exp is {size} times the right one", size * softmax - target),
        (f"the part of the target's logit is {size} times the right one", softmax - size * target),
        ("the part of the sum of exp is missing", -target),
        ("the part of the target's logit is missing", softmax),
    ]
