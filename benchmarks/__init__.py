"""Benchmarks: ours and torch's on the same work, alternating in one run, reported as ratios."""
