"""DiLoCo and its kin: training on islands that seldom talk. fragment.py has the arithmetic."""
