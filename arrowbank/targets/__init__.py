"""Target banks: hidden states of a big model, imported or captured, proved, and mapped onto a draft's vocabulary.

    importing.py       a dump or another trainer's cache → a target bank, or straight to a cache

Importing this package pulls in neither torch nor transformers.
"""
