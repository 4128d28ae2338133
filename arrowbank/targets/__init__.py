"""Target banks: hidden states of a big model, imported or captured, verified, and mapped onto a draft's vocabulary.

    importer.py        a dump or another trainer's cache → a target bank, or straight to a cache
    capture.py         samples and a model → a target bank
    conversations.py   messages → tokens, and which of them the assistant wrote; chat_template.py renders them in a child process
    target_rows.py     samples → token rows, made once
    shards.py          the shards of a target bank, from any rows
    check_model.py     the checks, and samples computed again
    vocab.py           a draft's vocabulary

Importing this package pulls in neither torch nor transformers.
"""
