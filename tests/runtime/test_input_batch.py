import torch

from noria.kernels.paged_attention import AttentionRow
from noria.runtime.input_batch import InputBatch
from noria.sampling_params import SamplingParams
from noria.scheduler_output import SamplingInput, ScheduledSequence

BLOCK_SIZE = 4
NUM_BLOCKS = 100


CPU = torch.device("cpu")


def build(*rows):
    return InputBatch.build(rows, BLOCK_SIZE, NUM_BLOCKS)


def sampling(position):
    return SamplingInput(SamplingParams(), seed=7, position=position)


CHUNK = ScheduledSequence(11, [50, 51, 52], 3, [9, 2], sampling=None)
LAST_CHUNK = ScheduledSequence(12, [60, 61], 0, [5], sampling=sampling(2))
DECODE = ScheduledSequence(13, [70], 8, [4, 30, 6], sampling=sampling(9))
PADDING = ScheduledSequence(14, [80], 5, [7, 8], sampling=None, is_padding=True)


def test_rows_stand_one_after_the_other():
    batch = build(CHUNK, LAST_CHUNK, PADDING, DECODE).decoder_input(CPU)
    assert batch.token_ids.tolist() == [50, 51, 52, 60, 61, 80, 70]
    assert batch.positions.tolist() == [3, 4, 5, 0, 1, 5, 8]
    #                                    9*4+3, then block 2; block 5; after the pool; first of block 6
    assert batch.slot_mapping.tolist() == [39, 8, 9, 20, 21, 400, 24]


def test_only_sampled_rows_have_logits():
    batch = build(CHUNK, LAST_CHUNK, PADDING, DECODE)
    assert batch.decoder_input(CPU).logit_indices.tolist() == [4, 6]
    assert batch.sampled_request_ids == (12, 13)
    assert batch.sampling_inputs == (LAST_CHUNK.sampling, DECODE.sampling)


def test_attention_rows():
    assert build(CHUNK, PADDING, DECODE).decoder_input(CPU).rows == (
        AttentionRow(query_start=0, num_queries=3, first_position=3, context_len=6, block_table=[9, 2]),
        AttentionRow(query_start=3, num_queries=1, first_position=5, context_len=5, block_table=[7, 8]),
        AttentionRow(query_start=4, num_queries=1, first_position=8, context_len=9, block_table=[4, 30, 6]),
    )


def test_nothing_sampled_is_empty_int64():
    batch = build(CHUNK)
    assert batch.sampling_inputs == ()
    assert batch.decoder_input(CPU).logit_indices.shape == (0,)
    assert batch.decoder_input(CPU).logit_indices.dtype == torch.int64
