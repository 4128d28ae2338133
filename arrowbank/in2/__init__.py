"""IN2 arms: facts planted far from where they are asked for, in real filler, drawn to the bit.

    config.py     the options, and what is refused without reading anything
    draws.py      the random words, in blocks            placement.py   one example's sites, keys, values and needles
    fillers.py    where the filler comes from            rows.py        examples as a shard's record batch
    building.py   the stage `in2 build`                  rawshards.py   its raw shards and manifest, made while it runs
    gate.py       the stage `in2 verify`                 probes.py      trials that a model is measured on
    scoring.py    the stage `in2 score`                  reach.py       gaps, intervals, the reach
    plot.py       its picture

Nothing but the needles' places differs between arms of the same options: a difference between two trained models is distance.
"""
