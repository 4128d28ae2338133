"""IN2 arms: facts planted far from where they are asked for, in real filler, drawn to the bit.

    arm_config.py the options, and what is refused without reading anything
    draws.py      the random words, in blocks            placement.py   one example's sites, keys, values and needles
    fillers.py    where the filler comes from            blocks.py      the rows of a shard, read back
    arm.py        the stage `in2 build`                  raw_shards.py  its raw shards and manifest, made while it runs
    verify_arms.py  the stage `in2 verify`               arm_checks.py  its checks
    probes.py     trials that a model is measured on     score.py       the stage `in2 score`: gaps, intervals, the reach, the plot

Nothing but the needles' places differs between arms of the same options: a difference between two trained models is distance.
"""
