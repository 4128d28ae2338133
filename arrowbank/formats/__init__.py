"""Files of other people's programs: one file a format, each with a reader, a writer, or both.

    safetensors.py   a safetensors file: what is in it, and its bytes
    dump.py          an inference engine's dump of hidden states
    deepspec.py      DeepSpec's target cache, version 2
    specforge.py     SpecForge's offline folders: eagle3, dflash, dspark
    speculators.py   the folder of speculators
    modelopt.py      Model-Optimizer's offline folder
    vllm_states.py   the folder of vLLM's hidden-state connector
    sample_files.py  what readers of folders with a file a sample share
    tokens.py        token shards of loaders              plain_files.py   banks as Parquet and mirrors
    export.py        how trainers number layers, and what exports of hidden states share
    export_folder.py writing a folder that is whole or not there, and resumes after a crash
    sidecar.py       the note that comes last             registry.py      every format, and the stage `export`
    export_checks.py exports and other programs' folders, verified

What holds target rows is read as, and written from, `arrowbank.bank.kinds.targets_bank.TargetRows`.
"""
