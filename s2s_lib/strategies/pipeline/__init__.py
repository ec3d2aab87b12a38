"""Pipeline parallelism: a schedule as data, simulated and run."""

from s2s_lib.strategies.pipeline import schedule as schedule
