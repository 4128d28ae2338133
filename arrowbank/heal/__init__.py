"""Healing an MTP draft: it is trained, alone, to agree with its own trunk again, and what a server would keep of it is counted.

config.py    the options                              windows.py   a trunk bank's windows as tensors
measure.py   acceptance by data set and chain step    parity.py    is the draft fed what it was trained on?
feeding.py   what later steps are fed                 training.py  jobs, schedule, measurements, the best snapshot
state.py     what a killed run goes on from           plot.py      loss and acceptance as a picture
healing.py   the stage `heal`: all of it, and the files that are written
dump.py      the draft's rows as a bank
"""
