"""The compiled CPU kernels against torch's, and that a token's logits depend on its own sequence alone, bit for bit.

Logits of all tokens are compared, not only of those whose successor would be drawn.
"""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import random
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from noria.kernels.cpu_library import WEIGHT_FORMATS, load_library
from noria.kernels.cpu_weights import CpuWeights
from noria.kernels.ops import torch_kernels
from noria.models import cpu_decoder
from noria.models.cpu_decoder import CpuDecoder, CpuFormat
from noria.models.decoder import Decoder
from noria.models.model_config import ModelConfig, load_model_config
from noria.models.model_store import resolve_model
from noria.models.safetensors_loader import load_weights
from noria.models.weights import EMBEDDING, HEAD, expected_weights
from noria.runtime.input_batch import InputBatch
from noria.runtime.kv_cache import KVCache
from noria.scheduler_output import ScheduledSequence
from support.cpu_libraries import libraries_that_run
from support.rounded_weights import int4_weights
from support.tiny_models import FAMILIES, VOCAB_SIZE, tiny_config

CPU = torch.device("cpu")
NUM_BLOCKS = 300
POISONED_TOKEN = 77
# of Linux; Python's mmap does not name it
MAP_NORESERVE = 0x4000
KV_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
FORMATS = [(weights, kv_dtype) for weights in WEIGHT_FORMATS for kv_dtype in KV_DTYPES]
FLOAT32 = ("float32", "float32")
GARBAGE = {
    # in every format: all bits set
    "NaN": lambda memory: memory.fill_(-1),
    "zeros": lambda memory: memory.zero_(),
    "anything": lambda memory: memory.random_(-128, 127, generator=torch.Generator().manual_seed(0)),
}


def model_config(family: str, **overrides: object) -> ModelConfig:
    return ModelConfig.from_hf(tiny_config(family, **overrides).to_dict())


def random_weights(config: ModelConfig) -> dict[str, Tensor]:
    """Norms and biases too, and one token whose embedding is NaN."""
    generator = torch.Generator().manual_seed(1)
    weights = {}
    for name, shape in expected_weights(config).items():
        weights[name] = 0.2 * torch.randn(shape, generator=generator) + name.endswith("norm.weight")
    if not config.tie_word_embeddings:
        weights[EMBEDDING][POISONED_TOKEN] = torch.nan
    return weights


def prompt_of(length: int) -> list[int]:
    draw = random.Random(length)
    return [draw.randrange(POISONED_TOKEN) for _ in range(length)]


class Model:
    """A decoder and a cache that holds garbage at first. number_format: of a CpuDecoder; None is torch's."""

    def __init__(
        self,
        config: ModelConfig,
        number_format: tuple[str, str] | None,
        block_size: int = 16,
        num_threads: int = 2,
        garbage: str = "NaN",
        seed: int = 0,
        weights: dict[str, Tensor] | None = None,
    ) -> None:
        self.block_size = block_size
        weights = random_weights(config) if weights is None else weights
        self.decoder: Decoder | CpuDecoder
        if number_format is None:
            self.decoder = Decoder(config, weights, torch_kernels())
        else:
            self.decoder = CpuDecoder(config, weights, CpuFormat(*number_format, block_size), num_threads)
        assert weights == {}
        dtype = torch.float32 if number_format is None else KV_DTYPES[number_format[1]]
        self.cache = KVCache(config, NUM_BLOCKS, block_size, dtype, CPU)
        GARBAGE[garbage](self.cache.memory.view(torch.int8))
        self._free_blocks = random.Random(seed).sample(range(NUM_BLOCKS), NUM_BLOCKS)

    def table(self, length: int) -> list[int]:
        """Of so many positions and no more: blocks from anywhere."""
        return [self._free_blocks.pop() for _ in range(-(-length // self.block_size))]

    def step(self, *rows: ScheduledSequence) -> Tensor:
        """Logits [tokens, vocab_size] of all rows' tokens."""
        batch = InputBatch.build(rows, self.block_size, NUM_BLOCKS).decoder_input(CPU)
        everything = dataclasses.replace(batch, logit_indices=torch.arange(len(batch.token_ids)))
        return self.decoder.forward(everything, self.cache.layers).clone()

    def run(self, prompts: Sequence[list[int]], steps: Iterator[list[int]]) -> list[Tensor]:
        """Each prompt's logits [length, vocab_size]. steps: how many tokens of each prompt come next."""
        tables = [self.table(len(prompt)) for prompt in prompts]
        found: list[list[Tensor]] = [[] for _ in prompts]
        done = [0] * len(prompts)
        while done != [len(prompt) for prompt in prompts]:
            ends = [min(len(p), start + n) for p, start, n in zip(prompts, done, next(steps), strict=True)]
            active = [index for index, end in enumerate(ends) if end > done[index]]
            if not active:
                continue
            rows = [row(prompts[i][done[i] : ends[i]], done[i], tables[i]) for i in active]
            parts = self.step(*rows).split([len(r.token_ids) for r in rows])
            for index, logits in zip(active, parts, strict=True):
                found[index].append(logits)
            done = ends
        return [torch.cat(logits) for logits in found]


def row(tokens: list[int], start: int, table: Sequence[int], is_padding: bool = False) -> ScheduledSequence:
    return ScheduledSequence(0, tokens, start, table, sampling=None, is_padding=is_padding)


def one_by_one(prompts: Sequence[list[int]]) -> Iterator[list[int]]:
    for chosen in range(len(prompts)):
        yield [len(prompt) if index == chosen else 0 for index, prompt in enumerate(prompts)]


def in_chunks(prompts: Sequence[list[int]], size: int) -> Iterator[list[int]]:
    while True:
        yield [size] * len(prompts)


def at_random(prompts: Sequence[list[int]], seed: int) -> Iterator[list[int]]:
    draw = random.Random(seed)
    while True:
        yield [draw.choice((0, 1, 1, draw.randrange(60))) for _ in prompts]


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Within 1e-5 of the largest logit; one rounding of float32 is 6e-8 of it."""
    assert expected.isfinite().all()
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def compare_with_torch(config: ModelConfig, block_size: int, lengths: Sequence[int]) -> None:
    """Prompts, decodes, and then a batch of chunks, decodes and rows of a closed batch that are over."""
    ours, theirs = (Model(config, number_format, block_size) for number_format in (FLOAT32, None))
    tables = [ours.table(length + 20) for length in lengths]
    prompts = [row(prompt_of(n), 0, table) for n, table in zip(lengths, tables, strict=True)]
    decodes = [row([n % 70], n, table) for n, table in zip(lengths, tables, strict=True)]
    mixed = []
    for index, (n, table) in enumerate(zip(lengths, tables, strict=True)):
        num_tokens, is_padding = ((1, False), (9, False), (1, True), (3, True))[index % 4]
        mixed.append(row(prompt_of(num_tokens), n + 1, table, is_padding))
    # queries that see no position
    mixed += [row([5], 0, [], is_padding=True), row([6, 7], 0, [], is_padding=True)]
    for rows in (prompts, decodes, mixed, mixed[::-1]):
        assert_close(ours.step(*rows), theirs.step(*rows))


@pytest.mark.parametrize("block_size", [8, 16, 24, 32, 128])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_torch(family, block_size):
    lengths = [1, block_size - 1, block_size, block_size + 1, 127, 128, 129, 300]
    compare_with_torch(model_config(family, tie_word_embeddings=block_size % 16 == 8), block_size, lengths)


@pytest.mark.parametrize("head_dim", [8, 16, 24, 64, 80])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(3, 3), (4, 2), (3, 1), (10, 2), (16, 1), (25, 1)])
def test_heads_of_any_size_and_number(head_dim, num_heads, num_kv_heads):
    heads = {"head_dim": head_dim, "num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads}
    config = model_config("llama", hidden_size=8 * num_heads, **heads)
    compare_with_torch(config, 24 if num_heads % 2 else 16, [1, 17, 40, 129])


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        *(("mistral", {"sliding_window": window}) for window in (1, 2, 7, 16, 100, 130)),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen3", {"attention_bias": True, "head_dim": 8, "num_attention_heads": 5, "num_key_value_heads": 1}),
        # sizes that are no multiple of a vector
        ("llama", {"hidden_size": 60, "intermediate_size": 91, "head_dim": 8, "vocab_size": 301}),
    ],
)
def test_variants(family, overrides):
    for block_size in (8, 16):
        compare_with_torch(model_config(family, **overrides), block_size, [1, 6, 9, 127, 140, 300])


INVARIANT = {
    "llama": (model_config("llama"), 16),
    "window": (
        model_config("mistral", sliding_window=21, num_attention_heads=6, num_key_value_heads=2, head_dim=16),
        8,
    ),
    # neither heads nor blocks are multiples of 16, and the hidden size is none of 8
    "odd": (model_config("qwen3", head_dim=24, num_attention_heads=3, num_key_value_heads=1, hidden_size=100), 24),
}
PROMPTS = [prompt_of(length) for length in (150, 1, 37, 16, 129, 25)]


@pytest.mark.parametrize("name", INVARIANT)
@pytest.mark.parametrize(("weights", "kv_dtype"), FORMATS)
def test_logits_do_not_depend_on_mates_chunks_places_threads_or_garbage(name, weights, kv_dtype):
    config, block_size = INVARIANT[name]

    def model(num_threads: int, garbage: str = "NaN", seed: int = 0) -> Model:
        return Model(config, (weights, kv_dtype), block_size, num_threads, garbage, seed)

    expected = model(1).run(PROMPTS, one_by_one(PROMPTS))
    assert all(logits.isfinite().all() for logits in expected)
    for found in (
        model(2).run(PROMPTS, in_chunks(PROMPTS, 150)),
        model(1, "zeros", seed=1).run(PROMPTS, in_chunks(PROMPTS, 1)),
        model(3, "anything", seed=2).run(PROMPTS, in_chunks(PROMPTS, 7)),
        model(2, "anything", seed=3).run(PROMPTS, at_random(PROMPTS, 0)),
        model(3, seed=4).run(PROMPTS, at_random(PROMPTS, 1)),
    ):
        assert all(torch.equal(logits, own) for logits, own in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", [*INVARIANT, "groups", "wide"])
@pytest.mark.parametrize(("weights", "kv_dtype"), FORMATS)
def test_every_instruction_set_gives_the_same_bits(name, weights, kv_dtype, monkeypatch):
    """An answer must not depend on which machine of a fleet gave it."""
    libraries = libraries_that_run()
    if len(libraries) < 2:
        pytest.skip(f"this processor runs the kernels for {' and '.join(libraries)} alone")
    wide = model_config("llama", head_dim=80, num_attention_heads=8, num_key_value_heads=1, hidden_size=96)
    groups = model_config(
        "llama", head_dim=64, num_attention_heads=9, num_key_value_heads=3, hidden_size=90, intermediate_size=200
    )
    config, block_size = {**INVARIANT, "groups": (groups, 16), "wide": (wide, 32)}[name]
    # more rows than a tile of any product has, some of them with several chunks of 128 positions
    prompts = [prompt_of(length) for length in (*range(2, 20), 140, 290)]
    expected: list[Tensor] | None = None
    for library in libraries.values():
        monkeypatch.setattr(cpu_decoder, "load_library", lambda library=library: library)
        model = Model(config, (weights, kv_dtype), block_size)
        found = model.run(prompts, at_random(prompts, 0))
        assert all(logits.isfinite().all() for logits in found)
        assert expected is None or all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
        expected = found


def test_int4_is_torchs_pass_over_the_rounded_weights():
    """But for the activations, which are rounded to 127 steps, and the head, which is int8."""
    config = model_config("llama")
    rounded = random_weights(config)
    for name, weight in rounded.items():
        if weight.dim() == 2 and name != EMBEDDING:
            rounded[name] = int4_weights(weight).float()
    prompts = [prompt_of(40)]
    expected = Model(config, None, weights=rounded).run(prompts, one_by_one(prompts))[0]
    found = Model(config, ("int4", "float32")).run(prompts, one_by_one(prompts))[0]
    assert (found - expected).square().mean().sqrt() < 0.06 * expected.std()


def test_the_head_beside_int4_is_int8():
    config = model_config("llama", tie_word_embeddings=False)
    weights = random_weights(config)
    num_head, num_embedding = weights[HEAD].numel(), weights[EMBEDDING].numel()
    num_norms = sum(weight.numel() for weight in weights.values() if weight.dim() == 1)
    num_linear = sum(weight.numel() for weight in weights.values()) - num_head - num_embedding - num_norms
    decoder = Model(config, ("int4", "float32")).decoder
    # 20 bytes for 32 weights; the head's have a float32 scale for each output
    linear_bytes, head_bytes = num_linear * 20 // 32, num_head + 4 * VOCAB_SIZE
    assert decoder.weight_bytes == linear_bytes + head_bytes + 4 * (num_embedding + num_norms)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("garbage", GARBAGE)
def test_keys_that_are_no_numbers_show(kv_dtype, garbage):
    """A checkpoint with NaN in a projection must not be answered with plausible text, whatever the cache held."""
    config = model_config("llama")
    weights = random_weights(config)
    weights["model.layers.0.self_attn.k_proj.weight"][:] = torch.nan
    prompts = [prompt_of(20)]
    model = Model(config, ("float32", kv_dtype), garbage=garbage, weights=weights)
    assert model.run(prompts, one_by_one(prompts))[0].isnan().all()


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_value_that_is_no_number_shows_whatever_its_weight(kv_dtype):
    """Whose weight may have become 0. That it showed in some tiles only made it depend on how the prompt was cut."""
    config = model_config("llama", num_hidden_layers=1, tie_word_embeddings=False)
    weights = random_weights(config)
    # of one token a value is inf, and its keys are numbers; all keys are far apart
    token, place = 7, 20
    weights[EMBEDDING][:, 0] = 0
    weights[EMBEDDING][token, 0] = 50
    layer = "model.layers.0."
    weights[f"{layer}input_layernorm.weight"][0] = 1
    value = weights[f"{layer}self_attn.v_proj.weight"]
    value[:, 0], value[0, :], value[0, 0] = 0, 0, 3e38
    weights[f"{layer}self_attn.k_proj.weight"] *= 300
    prompt = [other if other != token else token + 1 for other in prompt_of(80)]
    prompt[place] = token
    for size in (80, 9, 1):
        copies = {name: weight.clone() for name, weight in weights.items()}
        logits = Model(config, ("float32", kv_dtype), weights=copies).run([prompt], in_chunks([prompt], size))[0]
        assert logits[:place].isfinite().all()
        assert not logits[place:].isfinite().all(1).any()


@pytest.mark.parametrize("half_head", [4, 12, 20, 32])
def test_a_position_is_turned_alike_in_any_batch(half_head):
    """Cosines come from torch, whose vectors and what is left over of them must not differ."""
    config = model_config("llama", head_dim=2 * half_head, max_position_embeddings=8192, num_hidden_layers=1)
    model = Model(config, FLOAT32, block_size=32, garbage="zeros")
    # all of one sequence, most of whose positions hold zeros
    rows = [row([3], position, range(NUM_BLOCKS)) for position in range(7, 8192, 53)]
    together = model.step(*rows)
    assert together.isfinite().all()
    for index in range(0, len(rows), 5):
        assert torch.equal(model.step(rows[index])[0], together[index])


@pytest.mark.parametrize(("weights", "kv_dtype"), FORMATS)
def test_a_token_that_is_not_finite_spoils_what_follows_in_its_sequence_alone(weights, kv_dtype):
    """Not what comes before it, either: prefix caching may share those blocks with other sequences."""
    config = model_config("llama", tie_word_embeddings=False)
    prompts = [prompt_of(40), prompt_of(33), prompt_of(7)]
    expected = Model(config, (weights, kv_dtype)).run(prompts, one_by_one(prompts))
    spoiled = [list(prompt) for prompt in prompts]
    spoiled[1][20] = POISONED_TOKEN
    for steps in (in_chunks(prompts, 40), in_chunks(prompts, 9), in_chunks(prompts, 1)):
        found = Model(config, (weights, kv_dtype)).run(spoiled, steps)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[2], expected[2])
        assert found[1][20:].isnan().all()
        assert torch.equal(found[1][:20], expected[1][:20])


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_blocks_beyond_two_gib(kv_dtype):
    """Their addresses do not fit into 32 bits. Only the pages that are touched take memory."""
    config = model_config("llama", head_dim=8, num_attention_heads=2, num_key_value_heads=1)
    model = Model(config, ("float32", kv_dtype), block_size=8)
    block = model.cache.memory[0, 0, 0]
    num_blocks = 2**31 // block.nbytes * 5 // 4
    shape = (config.num_layers, 2, num_blocks, *block.shape)
    size = 4 * num_blocks * block.nbytes
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    memory = torch.frombuffer(pages, dtype=block.dtype).view(shape)
    prompt = prompt_of(40)
    table = [num_blocks - 1, 3, num_blocks - 7, num_blocks // 2, num_blocks - 2]
    batch = InputBatch.build([row(prompt, 0, table)], 8, num_blocks - 1).decoder_input(CPU)
    batch = dataclasses.replace(batch, logit_indices=torch.arange(40))
    found = model.decoder.forward(batch, [(layer[0], layer[1]) for layer in memory]).clone()
    assert torch.equal(found, model.run([prompt], one_by_one([prompt]))[0])


def test_no_sampled_token_gives_no_logits():
    model = Model(model_config("llama"), FLOAT32)
    batch = InputBatch.build([row([1, 2, 3], 0, model.table(3))], 16, NUM_BLOCKS).decoder_input(CPU)
    assert model.decoder.forward(batch, model.cache.layers).shape == (0, VOCAB_SIZE)


def test_int4_keeps_the_embedded_model_s_weights():
    """All that the file has in Q4_1, which is all but norms and the embedding: bit for bit."""
    directory = resolve_model("embedded", None, "float32", print)
    config = load_model_config(directory)
    library, compared = load_library(), 0
    for name, weight in load_weights(directory, config, torch.float32, "cpu").items():
        if weight.dim() != 2 or name == EMBEDDING:
            continue
        packed = CpuWeights(library)
        linear, num_inputs = packed.pack("int4", weight), weight.shape[1]
        # each row asks for one input of every output
        rows, found = torch.eye(num_inputs), torch.empty(num_inputs, len(weight))
        library.noria_linear(ctypes.byref(linear), rows.data_ptr(), num_inputs, found.data_ptr())
        assert torch.equal(found, weight.T), name
        compared += 1
    assert compared == 7 * config.num_layers
