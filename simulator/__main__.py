"""`python -m simulator`: what `springtide simulate` runs."""

from simulator.cli import simulate

if __name__ == "__main__":
    simulate(prog_name="springtide simulate")
