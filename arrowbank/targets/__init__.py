"""Target banks: hidden states of a big model, imported or captured, proved, and mapped onto a draft's vocabulary.

    importing.py       a dump or another trainer's cache → a target bank, or straight to a cache
    capturing.py       samples and a model → a target bank
      records.py       the samples in a file
      conversations.py messages → tokens, and which of them the assistant wrote
      rows.py          samples → token rows, made once
      captured.py      a shard of token rows → its hidden states
    committing.py      what both do alike

Importing this package pulls in neither torch nor transformers.
"""
