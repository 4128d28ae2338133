"""The soak: real commands killed, disks filled, banks damaged and inputs mutated at random, for as long as one likes.

    python -m tests.soak --minutes 60 --state soak.json

`world.py` makes the inputs and lists the commands, `children.py` runs them in processes that are forked from this one, and each
attack (`kills.py`, `disks.py`, `damage.py`, `inputs.py`) is a module with a function `attack(world, rng)` that tries a few
inputs and says what came of each. Everything that is drawn comes from the seed and the number of the round, so that
`--seed S --only kills:17` repeats a round (but for the moments of kills by the clock).
"""
