"""The checks of the exercises: `check.NAME(yours)` says that yours is right, or where it is not.

What you wrote runs on real ranks. Every rank's result is compared, element by element, with what
it must be, then what it sent. An exercise that is still `...` prints "not attempted"; a wrong
answer raises `Wrong`, which a notebook shows as one sentence.

An input of the checks is (1, 2, 3, ...) times 10^r on rank r, so in a sum the digit at 10^r is
rank r's part: 1011 where 1111 should be lacks what rank 2 has.
"""

from s2s_lib.course.check.answers import Wrong
from s2s_lib.course.check.lesson00 import all_gather_by_doubling, reduce_scatter, ring_of_eight
from s2s_lib.course.check.lesson01 import accumulate, average_gradients, ddp_of_eight
from s2s_lib.course.check.lesson02 import clip_shards, sharded_adamw_step, zero_of_eight
from s2s_lib.course.check.lesson03 import hybrid_all_reduce, hybrid_of_eight, local_sgd
from s2s_lib.course.check.lesson04 import bubble_of_eight, one_f_one_b, three_in_flight
from s2s_lib.course.check.lesson05 import cut_fused, cut_gpt, cut_loss
from s2s_lib.course.check.lesson06 import join_pieces, mesh_places, norm_of_mesh
from s2s_lib.course.check.lesson07 import error_feedback, line_of_islands, mended_diloco

__all__ = [
    "Wrong",
    "accumulate",
    "all_gather_by_doubling",
    "average_gradients",
    "bubble_of_eight",
    "clip_shards",
    "cut_fused",
    "cut_gpt",
    "cut_loss",
    "ddp_of_eight",
    "error_feedback",
    "hybrid_all_reduce",
    "hybrid_of_eight",
    "join_pieces",
    "line_of_islands",
    "local_sgd",
    "mended_diloco",
    "mesh_places",
    "norm_of_mesh",
    "one_f_one_b",
    "reduce_scatter",
    "ring_of_eight",
    "sharded_adamw_step",
    "three_in_flight",
    "zero_of_eight",
]
