"""Run by the Python of another program's environment: its own data set and collator read an export, and the tensors are saved.

python read_exports.py PROGRAM FOLDER OUT: OUT is what torch.save wrote of {"samples": [tensors], "batch": tensors}. Nothing of arrowbank
is imported here.
"""

import sys
from pathlib import Path

import torch

MAX_LENGTH = 64


def speculators(folder):
    from speculators.train.data import ArrowDataset, CollateFn

    data = ArrowDataset(MAX_LENGTH, folder, on_missing="raise")
    samples = [data[row] for row in range(len(data))]
    layers, width = 3, samples[0]["verifier_last_hidden_states"].shape[1]
    return samples, CollateFn(MAX_LENGTH, width, layers)([data[row] for row in range(len(data))])


def modelopt(folder):
    from modelopt.torch.speculative.eagle.utils import EagleOfflineDataCollator, OfflineSupervisedDataset

    data = OfflineSupervisedDataset(sorted(map(str, Path(folder).glob("*.pt"))), answer_only_loss=True)
    samples = [data[row] for row in range(len(data))]
    return samples, EagleOfflineDataCollator(MAX_LENGTH)(samples)


def specforge(folder, strategy):
    from specforge.algorithms.common import dflash_family_data as family
    from specforge.algorithms.eagle3 import data as eagle3
    from specforge.runtime.data_plane.feature_store import load_feature_file

    if strategy == "eagle3":
        reader = eagle3.build_offline_reader(folder, run_id="run", ttt_length=7, max_len=MAX_LENGTH)
        normalize, collate = eagle3.build_offline_normalizer(MAX_LENGTH), eagle3.build_offline_collator()
    elif strategy == "dflash":
        reader = family.build_offline_reader("dflash", folder, run_id="run", ttt_length=7, max_len=MAX_LENGTH)
        normalize, collate = family.build_offline_normalizer(MAX_LENGTH), family.build_collator()
    else:
        reader = family.build_dspark_offline_reader("dspark", folder, run_id="run", ttt_length=7, max_len=MAX_LENGTH)
        normalize, collate = family.build_dspark_offline_normalizer(MAX_LENGTH), family.build_dspark_collator()
    reader.validate_files = True
    paths = [ref.feature_store_uri.removeprefix("file://") for ref in reader]
    samples = [normalize(load_feature_file(path)) for path in paths]
    return samples, collate(samples)


def main(program, folder, out):
    name, _, strategy = program.partition("-")
    samples, batch = {"speculators": speculators, "modelopt": modelopt}.get(name, lambda folder: specforge(folder, strategy))(
        folder
    )
    torch.save({"samples": samples, "batch": batch}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
