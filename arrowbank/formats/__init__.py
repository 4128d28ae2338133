"""Files of other people's programs: one file a format, each with a reader, a writer, or both.

    safetensors.py   a safetensors file: what is in it, and its bytes
    dump.py          an inference engine's dump of hidden states
    deepspec.py      DeepSpec's target cache, version 2
    specforge.py     SpecForge's offline folders: eagle3, dflash, dspark
    speculators.py   the folder of speculators
    modelopt.py      Model-Optimizer's offline folder
    layers.py        how trainers count layers
    exported.py      what exports share: a file a sample, and the note that comes last
    folder.py        writing a folder that is whole or not there, and goes on after a crash

What holds target rows is read as, and written from, `arrowbank.bank.kinds.targets.TargetRows`.
"""
