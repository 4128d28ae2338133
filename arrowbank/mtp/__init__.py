"""Trunk banks and the draft of a model (its multi-token-prediction block): read out of a checkpoint, run, measured, healed, written back.

    trunk_records.py               texts or token ids → packed windows
    trunk_plan.py, trunk_build.py  the stage `trunk build`: its options, and windows → a trunk bank
    trunk_passes.py                the model's most likely next tokens and hidden states
    trunk_taps.py                  hidden states of chosen layers on the held-out windows, beside a trunk bank
    layouts.py                     families: which tensors of a checkpoint are the draft's, and what each family feeds it
    checkpoint.py                  a model folder's tensors, and a tensor ↔ what is stored of it: floats, int8 rows, NF4 blocks
    draft.py                       the torch module: embedding and hidden state → one decoder block → hidden state for the trunk's head
    draft_files.py                 a checkpoint, or the trunk's last block → a draft; a copy of a checkpoint with another draft in it
    batches.py, loss.py            windows as tensors; KL to the trunk's most likely tokens, in memory bounded for any vocabulary
    acceptance.py, measure.py      counts of accepted drafts, as a server would see them
    heal_config.py, heal.py        the stage `heal`, and the draft's rows before and after as a bank
    heal_folder.py, trainer.py, trace.py  OUT.heal, the training and its state, and its trace with its plots

Importing this package pulls in neither torch nor transformers.
"""
