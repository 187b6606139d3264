"""The decoder against transformers on the same weights, for each family, however the tokens come."""

import pytest
import torch
import transformers

from noria.kernels.ops import torch_kernels
from noria.models.decoder import Decoder
from noria.models.model_config import load_model_config
from noria.models.model_store import resolve_model
from noria.models.safetensors_loader import load_weights
from noria.runtime.input_batch import InputBatch
from noria.runtime.kv_cache import KVCache
from noria.sampling_params import SamplingParams
from noria.scheduler_output import SamplingInput, ScheduledSequence
from support.tiny_models import FAMILIES, tiny_model_dir

CPU = torch.device("cpu")
BLOCK_SIZE = 4
NUM_BLOCKS = 80
TOLERANCE = 1e-3
PROMPT = torch.randint(0, 304, (70,), generator=torch.Generator().manual_seed(3)).tolist()


class Model:
    """A decoder with its cache, and the logits that transformers has for PROMPT."""

    def __init__(self, directory, dtype=torch.float32):
        config = load_model_config(directory)
        self.weights = load_weights(directory, config, dtype, CPU)
        self.decoder = Decoder(config, self.weights, torch_kernels())
        self.cache = KVCache(config, NUM_BLOCKS, BLOCK_SIZE, dtype, CPU)
        # what was never written must never be read
        for layer in self.cache.layers:
            for cache in layer:
                cache.fill_(torch.nan)
        reference = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
        with torch.inference_mode():
            self.expected = reference(torch.tensor([PROMPT])).logits[0].float()

    def step(self, *rows):
        """Logits of the rows that are sampled."""
        batch = InputBatch.build(rows, BLOCK_SIZE, NUM_BLOCKS)
        return self.decoder.forward(batch.decoder_input(CPU), self.cache.layers)

    def check(self, logits, position):
        assert (logits - self.expected[position]).abs().max() < TOLERANCE


def row(tokens, start=0, first_block=0, is_sampled=True, is_padding=False):
    """Descending block ids, so that a table that is read in order of ids shows."""
    return ScheduledSequence(
        request_id=first_block,
        token_ids=tokens,
        num_computed_tokens=start,
        block_table=range(first_block + 19, first_block - 1, -1),
        sampling=SamplingInput(SamplingParams(), seed=0, position=0) if is_sampled else None,
        is_padding=is_padding,
    )


@pytest.fixture(scope="module", params=[(family, tied) for family in FAMILIES for tied in (True, False)], ids=str)
def model(request, tmp_path_factory):
    family, tied = request.param
    return Model(tiny_model_dir(tmp_path_factory.mktemp("model"), family, tied=tied))


@pytest.mark.parametrize("chunk_size", [1, 5, 16, 70])
def test_logits_equal_transformers_in_any_chunks(model, chunk_size):
    for start in range(0, len(PROMPT), chunk_size):
        logits = model.step(row(PROMPT[start : start + chunk_size], start))
        model.check(logits[0], min(start + chunk_size, len(PROMPT)) - 1)


def test_rows_of_all_kinds_in_one_batch(model):
    model.step(row(PROMPT[:30], is_sampled=False), row(PROMPT[:41], first_block=20), row(PROMPT[:9], first_block=40))
    of_padding = [layer_cache[40:60].clone() for layer in model.cache.layers for layer_cache in layer]
    logits = model.step(
        row(PROMPT[30:31], 30),
        row([5], 9, first_block=40, is_sampled=False, is_padding=True),
        row(PROMPT[41:60], 41, first_block=20),
        row(PROMPT[:12], first_block=60, is_sampled=False),
    )
    assert len(logits) == 2
    model.check(logits[0], 30)
    model.check(logits[1], 59)
    # the padding row wrote nothing
    after = [layer_cache[40:60] for layer in model.cache.layers for layer_cache in layer]
    torch.testing.assert_close(after, of_padding, rtol=0, atol=0, equal_nan=True)


def test_no_sampled_row_gives_no_logits(model):
    assert model.step(row(PROMPT[:3], is_sampled=False)).shape == (0, 304)


def test_loading_takes_the_weights_out_of_the_dict(model):
    assert model.weights == {}


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48}),
        ("llama", {"head_dim": 24}),
        ("mistral", {"sliding_window": 7}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}),
        ("qwen3", {"attention_bias": True, "num_attention_heads": 3, "num_key_value_heads": 1}),
    ],
)
def test_variants(family, overrides, tmp_path):
    model = Model(tiny_model_dir(tmp_path, family, **overrides))
    model.step(row(PROMPT[:20], is_sampled=False), row(PROMPT[:5], first_block=20, is_sampled=False))
    logits = model.step(row(PROMPT[20:33], 20), row(PROMPT[5:6], 5, first_block=20))
    model.check(logits[0], 32)
    model.check(logits[1], 5)
    for position in range(33, 40):
        model.check(model.step(row(PROMPT[position : position + 1], position))[0], position)


def test_a_sequence_does_not_change_with_its_batch_mates(model):
    def decode(*mates):
        model.step(row(PROMPT[:20]))
        model.step(*(row(PROMPT[: 7 * i], first_block=20 * i) for i in mates), row([1], first_block=60))
        logits = []
        for i in range(8):
            rows = [row(PROMPT[20 + i : 21 + i], 20 + i)]
            rows += [row(PROMPT[7 * m + i : 7 * m + i + 1], 7 * m + i, first_block=20 * m) for m in mates]
            logits.append(model.step(*rows)[0])
        return torch.stack(logits)

    alone, beside = decode(), decode(1, 2)
    assert torch.equal(alone.argmax(-1), beside.argmax(-1))
    assert (alone - beside).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_stays_near_float32(dtype, tmp_path):
    # small weights: with the usual ones of tests a rounding grows from layer to layer
    directory = tiny_model_dir(tmp_path, "qwen3", initializer_range=0.05)
    exact = Model(directory).expected
    model = Model(directory, dtype)
    logits = torch.cat([model.step(row(PROMPT[:9])), model.step(row(PROMPT[9:10], 9))])
    assert logits.dtype == torch.float32
    scale = exact.abs().max()
    assert (logits - exact[8:10]).abs().max() < 0.05 * scale


def test_logits_of_the_embedded_model_are_those_of_transformers():
    model = Model(resolve_model("embedded", None, "float32", print))
    for start, end in ((0, 40), (40, 56), (56, 70)):
        model.check(model.step(row(PROMPT[start:end], start))[0], end - 1)
