"""Transformers' own model with the random weights that Noria's has."""

from __future__ import annotations

from typing import Any

import torch

from gpu.random_models import random_weights
from noria.models.model_config import ModelConfig


def transformers_model(config: ModelConfig, dtype: torch.dtype, device: torch.device, std: float) -> Any:
    """LlamaForCausalLM with torch's attention, on the device. Raises ImportError without transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    document = config.to_hf(str(dtype).removeprefix("torch."))
    hf_config = LlamaConfig(**{key: value for key, value in document.items() if key in _FIELDS}, pad_token_id=None)
    hf_config._attn_implementation = "sdpa"
    before = torch.get_default_dtype()
    # so that parameters have it, and what the rotation is made of stays in float32, as when a checkpoint is loaded
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(hf_config)
    finally:
        torch.set_default_dtype(before)
    weights = random_weights(config, dtype, device, std)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected, f"weights that Transformers does not know: {unexpected}"
    assert set(missing) <= {"lm_head.weight"}, f"weights that are missing: {missing}"
    model.tie_weights()
    # no text is ended by a token
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "rope_parameters", "attention_bias", "mlp_bias"),
    *("tie_word_embeddings", "max_position_embeddings", "dtype"),
)
