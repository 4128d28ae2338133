"""Trunk banks: what a model with a multi-token-prediction draft computes itself, as the teacher of that draft.

packing.py     records → shuffled, joined, cut into windows (pure)
sources.py     a token bank, texts, a saved dataset → records of token ids
planning.py    TrunkConfig, and all that is fixed before the first forward pass
computing.py   one shard of windows → hidden states and most likely next tokens
tapping.py     the held-out windows' layers, as a bank of its own
building.py    the stage, and its estimate
"""
