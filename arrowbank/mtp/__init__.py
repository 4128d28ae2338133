"""The draft of a model: its multi-token-prediction block, read out of a checkpoint, run, measured, and written back.

    layouts.py      families: which tensors of a checkpoint are the draft's, and what each family feeds it
    places.py       the module's tensors ↔ the checkpoint's (packed experts, a projection with its halves the other way round)
    codecs.py       a tensor ↔ what is stored of it: plain floats, int8 rows, NF4 blocks
    checkpoint.py   a model folder's tensors, straight from its safetensors
    draft.py        the torch module: embedding and hidden state → one decoder block → hidden state for the trunk's head
    loading.py      a checkpoint, or the trunk's last block → a draft
    unroll.py       what a draft sees at the steps of a chain, and in rounds as a server runs them
    acceptance.py   counts of accepted drafts, as a server would see them
    loss.py         KL to the trunk's most likely tokens over the whole vocabulary, in memory that does not grow with it
    saving.py       a copy of a checkpoint with another draft in it

Importing this package pulls in neither torch nor transformers.
"""
