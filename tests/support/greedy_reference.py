"""What Transformers' `model.generate()` answers to twenty prompts on the embedded model, greedily, in float32.

The answers are kept in tests/data; `python -m support.greedy_reference` (in tests/) writes them anew, and a slow test
checks that they are still what Transformers says.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from noria.models.model_store import resolve_model

REFERENCE_FILE = Path(__file__).parent.parent / "data" / "greedy_reference.json"
MAX_TOKENS = 64
# where the two likeliest tokens lie closer than this, another choice is a tie and not an error
TIE = 1e-4

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "To make a good cup of tea, first",
    "The three laws of thermodynamics state that",
    "def fibonacci(n):\n    ",
    "Dear Sir or Madam,\n\nI am writing to complain about",
    "Q: What is the boiling point of water at sea level?\nA:",
    "The main difference between a process and a thread is",
    "1, 1, 2, 3, 5, 8,",
    "In 1969, the first humans landed on the Moon.",
    "A recipe for pancakes:\n- 200 g flour\n-",
    "Photosynthesis is the process by which",
    "SELECT name, age FROM users WHERE",
    "The old lighthouse keeper looked out over the storm and",
    "Translate to French: Good morning, my friend.",
    "The weather forecast for tomorrow says",
    "Café, naïve and façade are words that",
    "In computer science, a hash table is a data structure that",
    "Water wheels were used in the Middle Ages to",
    '{"name": "Ada", "born": 1815, "field":',
)


@dataclass(frozen=True)
class GreedyReference:
    """gaps: how far the chosen token's logit lies above the next one's, token by token."""

    prompt: str
    token_ids: list[int]
    gaps: list[float]


def load_reference() -> list[GreedyReference]:
    return [GreedyReference(**entry) for entry in json.loads(REFERENCE_FILE.read_text())]


def compute_reference(prompts: Sequence[str] = PROMPTS) -> list[GreedyReference]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = resolve_model("embedded", None, "float32", print)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    references = []
    for prompt in prompts:
        inputs = tokenizer(prompt, return_tensors="pt")
        output = model.generate(
            **inputs,
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        token_ids = output.sequences[0, inputs.input_ids.shape[1] :].tolist()
        tops = [logits[0].topk(2).values for logits in output.logits]
        references.append(GreedyReference(prompt, token_ids, [float(top[0] - top[1]) for top in tops]))
    return references


def first_difference(reference: GreedyReference, token_ids: Sequence[int]) -> int | None:
    """Where `token_ids` leave the reference for another reason than a tie; None if they do not."""
    for index, expected in enumerate(reference.token_ids):
        if index >= len(token_ids) or token_ids[index] != expected:
            return None if index < len(token_ids) and reference.gaps[index] < TIE else index
    return None if len(token_ids) == len(reference.token_ids) else len(reference.token_ids)


if __name__ == "__main__":
    REFERENCE_FILE.write_text(json.dumps([asdict(entry) for entry in compute_reference()], indent=1) + "\n")
