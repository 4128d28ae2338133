"""Records the windows that real loaders read, as tests/golden/loaders.json: what `arrowbank.formats.loaders` is tested against.

    python tests/peers/record_loaders.py CHECKOUTS [OUT]

CHECKOUTS holds clones by their names: llm.c, build-nanogpt, nanoGPT, modded-nanogpt. megatron-core, datatrove and ai2-olmo-core are
imported where they are installed (`pip install --no-deps megatron-core datatrove ai2-olmo-core` with their light dependencies). A C
compiler is needed for llm.c. Each loader runs in a process of its own over files whose tokens say where they lie:
4096 × file + place. A record is what it delivered: for each rank the (file, first token) of its windows, in order, for one epoch.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import numpy as np

STEP = 4096  # token = STEP × file + place
T = 16
CASES = [
    {"tokens": tokens, "batch": batch, "ranks": ranks}
    for tokens in ([96, 96, 96], [97, 97, 97], [97, 97, 41], [129, 113])
    for batch, ranks in ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2))
]


def write(case: dict[str, Any], folder: Path, ending: str) -> list[Path]:
    files = []
    folder.mkdir(exist_ok=True)
    for number, count in enumerate(case["tokens"]):
        ids = (STEP * number + np.arange(count)).astype("<u2")
        path = folder / f"shard_train_{number:05d}{ending}"
        if ending == ".npy":
            np.save(path, ids)
        elif ending == ".llmc":
            header = np.zeros(256, "<i4")
            header[:3] = 20240520, 1, count
            path.write_bytes(header.tobytes() + ids.tobytes())
        else:
            path.write_bytes(ids.tobytes())
        files.append(path)
    return files


def definitions(source: Path, *names: str) -> str:
    """The functions and classes of these names in a script, as they stand there."""
    text = source.read_text()
    nodes = {getattr(node, "name", ""): node for node in ast.parse(text).body}
    return "\n\n".join(ast.get_source_segment(text, nodes[name]) or "" for name in names)


def run(code: str, cwd: Path) -> list[int] | str:
    """The first tokens that a process prints, or the last line of what it says when it fails."""
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120)
    if done.returncode:
        return done.stderr.strip().splitlines()[-1]
    return [int(word) for word in done.stdout.split()]


def llmc(case: dict[str, Any], rank: int, folder: Path, checkouts: Path) -> list[int] | str:
    write(case, folder, ".llmc")
    program = folder / "loader"
    if not program.exists():
        (folder / "main.c").write_text(
            textwrap.dedent("""
            #include "llmc/dataloader.h"
            int main(int argc, char **argv) {
                size_t B = atoi(argv[2]), T = atoi(argv[3]);
                DataLoader loader;
                dataloader_init(&loader, argv[1], B, T, atoi(argv[4]), atoi(argv[5]), 0);
                size_t batches = 0;
                for (size_t i = 0; i < loader.glob_result.gl_pathc; i++) {
                    dataloader_load_shard_(&loader, i);
                    batches += loader.shard_num_samples;
                }
                dataloader_reset(&loader);
                for (size_t n = 0; n < batches; n++) {
                    dataloader_next_batch(&loader);
                    for (size_t b = 0; b < B; b++) printf("%d ", loader.inputs[b * T]);
                }
                return 0;
            }
            """)
        )
        subprocess.run(["cc", "-O1", f"-I{checkouts / 'llm.c'}", "-o", str(program), str(folder / "main.c"), "-lm"], check=True)
    words = [str(program), str(folder / "*.llmc"), *(str(n) for n in (case["batch"], T, rank, case["ranks"]))]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    if done.returncode:
        return "the loader aborts"
    return [int(word) for word in done.stdout.split()]


PULL = """
shards, seen, first = [], 0, None
while True:
    x, y = loader.next_batch()
    starts = [int(row[0]) for row in x]
    if starts[0] == first and seen:
        break
    first = starts[0] if first is None else first
    seen += 1
    print(*starts)
"""


def llmc_python(case: dict[str, Any], rank: int, folder: Path, checkouts: Path) -> list[int] | str:
    write(case, folder, ".llmc")
    code = "import glob, numpy as np, torch\nprint0 = lambda *a: None\n"
    code += definitions(checkouts / "llm.c" / "train_gpt2.py", "_peek_data_shard", "_load_data_shard", "DistributedDataLoader")
    code += f"\nloader = DistributedDataLoader('*.llmc', {case['batch']}, {T}, {rank}, {case['ranks']})\n{PULL}"
    return run(code, folder)


def build_nanogpt(case: dict[str, Any], rank: int, folder: Path, checkouts: Path) -> list[int] | str:
    write(case, folder / "edu_fineweb10B", ".npy")
    code = "import os, numpy as np, torch\nmaster_process = False\n"
    code += definitions(checkouts / "build-nanogpt" / "train_gpt2.py", "load_tokens", "DataLoaderLite")
    code += f"\nloader = DataLoaderLite({case['batch']}, {T}, {rank}, {case['ranks']}, 'train')\n{PULL}"
    return run(code, folder)


def modded_nanogpt(case: dict[str, Any], rank: int, folder: Path, checkouts: Path) -> list[int] | str:
    """align_to_bos=False: a rank's tokens are one run of batch × T; its windows are printed T apart."""
    write(case, folder, ".llmc")
    code = "import glob, threading, numpy as np, torch\nfrom pathlib import Path\nfrom torch import Tensor\nBOS_ID = 50256\n"
    code += (
        "TRAIN_MAX_NUM_DOCS = {}\nnext_multiple_of_n = lambda v, *, n: -(-max(v, 1) // n) * n\nget_bigram_hash = lambda x: x\n"
    )
    code += f"class dist:\n    is_initialized = lambda: True\n    get_rank = lambda: {rank}\n    get_world_size = lambda: {case['ranks']}\n"
    script = checkouts / "modded-nanogpt" / "train_gpt.py"
    text = definitions(script, "_load_data_shard", "distributed_data_generator")
    code += text.replace('device="cuda"', 'device="cpu"').replace("pin_memory=True", "pin_memory=False")
    tokens = case["batch"] * case["ranks"] * T
    code += f"""
generator = distributed_data_generator('*.llmc', {tokens}, {T}, align_to_bos=False)
try:
    for inputs, *_ in generator:
        print(*inputs[::{T}].tolist())
except (StopIteration, RuntimeError) as error:
    if 'StopIteration' not in repr(error):
        raise
"""
    return run(code, folder)


def nanotron(case: dict[str, Any], rank: int, folder: Path, checkouts: Path) -> list[int] | str:
    """datatrove's folder dataset, which nanotron's Nanoset reads by: every window once, whatever the ranks."""
    for path in write(case, folder, ".ds"):
        np.array([path.stat().st_size // 2], "<u8").tofile(f"{path}.index")
    code = f"""
from datatrove.utils.dataset import DatatroveFolderDataset
rows = DatatroveFolderDataset('.', {T - 1}, filename_pattern='*.ds', shuffle=False, token_size=2)
print(*[int(rows[i]['input_ids'][0]) for i in range(len(rows))])
"""
    return run(code, folder)


def megatron(case: dict[str, Any], rank: int, folder: Path, checkouts: Path) -> list[int] | str:
    """GPTDataset over one file of documents of T tokens, one epoch, document by document; the windows sorted, for it shuffles both."""
    documents = [count // T for count in case["tokens"]]
    code = f"""
import numpy as np, torch
from types import SimpleNamespace
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.utils import Split
for number, documents in enumerate({documents}):
    builder = IndexedDatasetBuilder(f"part{{number}}.bin", dtype=np.uint16)
    for document in range(documents):
        builder.add_item(torch.arange({T}) + {STEP} * number + {T} * document)
        builder.end_document()
    builder.finalize(f"part{{number}}.idx")
    tokenizer = SimpleNamespace(vocab_size=65536, eod=0, pad=0, unique_identifiers={{}})
    config = GPTDatasetConfig(
        random_seed=1, sequence_length={T}, split="1,0,0", reset_position_ids=False, reset_attention_mask=False,
        eod_mask_loss=False, tokenizer=tokenizer, path_to_cache="cache", blend=([f"part{{number}}"], None),
    )
    indexed = IndexedDataset(f"part{{number}}")
    rows = GPTDataset(indexed, f"part{{number}}", np.arange(documents, dtype=np.int32), None, Split.train, config)
    windows = [rows[i]["tokens"] for i in range(len(rows))]
    assert all(int(window[-1] - window[0]) == {T - 1} for window in windows)  # one whole document
    print(*sorted(int(window[0]) for window in windows))
"""
    return run(code, folder)


def olmo_core(case: dict[str, Any], rank: int, folder: Path, checkouts: Path) -> list[int] | str:
    """NumpyFSLDataset over headerless files."""
    write(case, folder, ".bin")
    code = f"""
import glob
from olmo_core.data.numpy_dataset import NumpyFSLDataset
from olmo_core.data.types import NumpyDatasetDType
rows = NumpyFSLDataset(*sorted(glob.glob('*.bin')), sequence_length={T}, pad_token_id=0, eos_token_id=1, vocab_size=65536, dtype=np_dtype)
"""
    code = code.replace("np_dtype", "NumpyDatasetDType.uint16.as_np_dtype()")
    code += "rows.prepare()\nprint(*[int(rows[i]['input_ids'][0]) for i in range(len(rows))])\n"
    return run(code, folder)


def nanogpt(tokens: int, folder: Path, checkouts: Path) -> list[int]:
    """All places at which get_batch starts a window of a file, in so many draws that none is missing."""
    (folder / "train.bin").write_bytes(np.arange(tokens).astype("<u2").tobytes())
    code = (
        f"import os, numpy as np, torch\ndata_dir, block_size, batch_size, device, device_type = '.', {T}, 5000, 'cpu', 'cpu'\n"
    )
    code += definitions(checkouts / "nanoGPT" / "train.py", "get_batch")
    code += "\nx, y = get_batch('train')\nprint(*sorted({int(row[0]) for row in x}))\n"
    found = run(code, folder)
    assert isinstance(found, list), found
    return found


LOADERS = {
    "llm.c": llmc,
    "llm.c-python": llmc_python,
    "build-nanogpt": build_nanogpt,
    "modded-nanogpt": modded_nanogpt,
    "nanotron": nanotron,
    "megatron-core": megatron,
    "olmo-core": olmo_core,
}


def main(checkouts: Path, out: Path) -> None:
    records = []
    for name, loader in LOADERS.items():
        with tempfile.TemporaryDirectory() as temporary:
            for number, case in enumerate(CASES):
                folder = Path(temporary) / str(number)
                folder.mkdir()
                ranks: list[Any] = [loader(case, rank, folder, checkouts) for rank in range(case["ranks"])]
                said = [
                    "stops" if isinstance(found, str) else [[token // STEP, token % STEP] for token in found] for found in ranks
                ]
                records.append({"loader": name, "length": T, **case, "windows": said})
        print(name, sum(record["loader"] == name for record in records), file=sys.stderr)
    with tempfile.TemporaryDirectory() as temporary:
        for tokens in (17, 18, 97):
            windows = nanogpt(tokens, Path(temporary), checkouts)
            records.append({"loader": "nanoGPT", "length": T, "tokens": [tokens], "batch": 1, "ranks": 1, "windows": windows})
    lines = ",\n".join(json.dumps(record, separators=(",", ":")) for record in records)
    out.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    here = Path(__file__).parents[1] / "golden" / "loaders.json"
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]) if len(sys.argv) > 2 else here)
