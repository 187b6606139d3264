"""What rounding weights and KV caches costs in accuracy on the embedded model, against float32 by torch's operators.

    python benchmarks/accuracy.py [--output FILE.json] [--variant NAME:KEY=VALUE,...] [--text FILE] [--model MODEL]

Of each variant: the perplexity of a text in windows of 512 tokens, the KL divergence of the next token's distribution
there, how often the greedy choice is the reference's in answers to fifty prompts, and the memory. Everything is
greedy and without a random number: two runs on one machine give the same figures. It takes some six minutes on two
cores, and 3 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from accuracy_prompts import PROMPTS
from accuracy_scoring import (
    CHUNK_TOKENS,
    AnswerComparison,
    TextComparison,
    compare_answers,
    compare_text,
    forced_choices,
    greedy_answers,
    log_probs,
    num_blocks_for,
    windows,
)
from named_options import named_options

from noria.config import EMBEDDED_MODEL, EngineConfig
from noria.config_sources import load_engine_config
from noria.errors import ConfigError
from noria.models.cpu_decoder import CpuDecoder
from noria.models.model_store import file_sha256, resolve_model
from noria.models.tokenizer import Tokenizer, load_tokenizer
from noria.runtime.build import build_runner
from noria.runtime.kv_cache import bytes_per_block
from noria.runtime.model_runner import ModelRunner
from noria_bench.environment import machine

WINDOW_TOKENS = 512
ANSWER_TOKENS = 64
REFERENCE = "float32-torch"
REFERENCE_OPTIONS = {"kernels": "torch"}
VARIANTS = (
    "float32:kernels=cpu",
    "int8-weights:weight_quantization=int8",
    "int4-weights:weight_quantization=int4",
    "bfloat16-kv:kernels=cpu,kv_cache_dtype=bfloat16",
    "int8-kv:kernels=cpu,kv_cache_dtype=int8",
    "int8-weights-bfloat16-kv:weight_quantization=int8,kv_cache_dtype=bfloat16",
    "int4-weights-bfloat16-kv:weight_quantization=int4,kv_cache_dtype=bfloat16",
    "int4-weights-int8-kv:weight_quantization=int4,kv_cache_dtype=int8",
    "int8-weights-int8-kv:weight_quantization=int8,kv_cache_dtype=int8",
)
# a variant that set one of these would be measured without it
_FIXED_KEYS = {"model", "cache_dir", "num_kv_blocks"}


@dataclass(frozen=True)
class Accuracy:
    """weight_bytes: None where torch's operators keep the weights in layouts of their own."""

    name: str
    options: Mapping[str, str]
    text: TextComparison
    answers: AnswerComparison
    weight_bytes: int | None
    kv_bytes_per_token: int


class AccuracyBenchmark:
    """Keeps the reference's log-probabilities: 4 bytes times the text's tokens times the vocabulary's size."""

    def __init__(self, model_dir: Path, text: str, prompts: Sequence[str]) -> None:
        """Raises ConfigError where the model cannot be read, ValueError for a text that is too short to be scored."""
        self._model_dir = model_dir
        self._tokenizer = load_tokenizer(model_dir)
        self._windows = windows(self._tokenizer.encode(text), WINDOW_TOKENS)
        if sum(map(len, self._windows)) < 3:
            raise ValueError("the text must have at least three tokens")
        self._prompts = [_encode_prompt(self._tokenizer, prompt) for prompt in prompts]
        runner = self._runner(REFERENCE_OPTIONS)
        self._end_token_ids = runner.decoder.config.eos_token_ids or self._tokenizer.eos_token_ids
        self._log_probs = [list(log_probs(runner, window)) for window in self._windows]
        self._answers = greedy_answers(runner, self._prompts, ANSWER_TOKENS, self._end_token_ids)
        on_text = compare_text(self._windows, self._log_probs, self._log_probs)
        in_answers = compare_answers(self._answers, [answer.token_ids for answer in self._answers], self._answers)
        self.reference = _accuracy(REFERENCE, REFERENCE_OPTIONS, runner, on_text, in_answers)

    def measure(self, name: str, options: Mapping[str, str]) -> Accuracy:
        """options: keys and values of EngineConfig. Raises ConfigError."""
        runner = self._runner(options)
        forced = [forced_choices(runner, answer) for answer in self._answers]
        own = greedy_answers(runner, self._prompts, ANSWER_TOKENS, self._end_token_ids)
        ours = (log_probs(runner, window) for window in self._windows)
        on_text = compare_text(self._windows, ours, self._log_probs)
        return _accuracy(name, options, runner, on_text, compare_answers(self._answers, forced, own))

    def _runner(self, options: Mapping[str, str]) -> ModelRunner:
        config = engine_config(options)
        num_blocks = num_blocks_for(WINDOW_TOKENS, self._prompts, ANSWER_TOKENS, config.block_size)
        return build_runner(engine_config({**options, "num_kv_blocks": str(num_blocks)}), self._model_dir)


def _accuracy(
    name: str, options: Mapping[str, str], runner: ModelRunner, text: TextComparison, answers: AnswerComparison
) -> Accuracy:
    decoder, cache = runner.decoder, runner.cache
    block_bytes = bytes_per_block(decoder.config, cache.block_size, cache.layers[0][0].dtype)
    weight_bytes = decoder.weight_bytes if isinstance(decoder, CpuDecoder) else None
    return Accuracy(name, options, text, answers, weight_bytes, block_bytes // cache.block_size)


def engine_config(options: Mapping[str, str]) -> EngineConfig:
    """On the CPU unless an option says otherwise. Raises ConfigError for an unknown key or a value not of its type."""
    return load_engine_config(None, {"device": "cpu", **options})


def parse_variant(text: str) -> tuple[str, dict[str, str]]:
    """`NAME:KEY=VALUE,...`, with keys of EngineConfig. Raises ValueError, or ConfigError for a key or value."""
    name, options = named_options("--variant", text)
    for key in _FIXED_KEYS & options.keys():
        raise ValueError(f"--variant {name}: {key} is the same for all variants")
    engine_config(options)
    return name, options


def markdown(results: Sequence[Accuracy]) -> str:
    """results: the reference first."""
    heads = ("variant", "perplexity", "change", "KL divergence", "same token, forced", "equal tokens", "equal answers")
    lines = [" | ".join(["", *heads, "weights MB", "KV bytes/token", ""]).strip()]
    lines.append("|---" + "|---:" * (len(heads) + 1) + "|")
    for one in results:
        text, answers = one.text, one.answers
        is_reference = one is results[0]
        cells = (
            one.name,
            f"{text.perplexity:.3f}",
            "" if is_reference else f"{math.expm1(text.log_ratio):+.2%} ± {text.log_ratio_error:.2%}",
            "" if is_reference else f"{text.kl:.2g} ± {text.kl_error:.1g}",
            f"{answers.forced_share:.2%}",
            f"{answers.mean_equal_tokens:.1f} of {answers.mean_tokens:.1f}",
            f"{answers.equal_share:.0%}",
            "" if one.weight_bytes is None else f"{one.weight_bytes / 1e6:.0f}",
            str(one.kv_bytes_per_token),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    results = []
    try:
        variants = [parse_variant(text) for text in args.variant or VARIANTS]
        names = [REFERENCE, *(name for name, _ in variants)]
        if len(set(names)) < len(names):
            raise ValueError(f"--variant: names must differ, from {REFERENCE} too: {', '.join(names)}")
        model_dir = resolve_model(args.model, None, "float32", _say)
        benchmark = AccuracyBenchmark(model_dir, args.text.read_text(encoding="utf-8"), PROMPTS)
        results.append(benchmark.reference)
        _say(f"{REFERENCE}: perplexity {benchmark.reference.text.perplexity:.3f}")
        for name, options in variants:
            results.append(benchmark.measure(name, options))
            _say(f"{name}: perplexity {results[-1].text.perplexity:.3f}, KL {results[-1].text.kl:.2g}")
    except (ConfigError, OSError, UnicodeDecodeError, ValueError) as error:
        raise SystemExit(str(error)) from None
    if args.output is not None:
        args.output.write_text(json.dumps(_record(args, model_dir, results), indent=1) + "\n", encoding="utf-8")
    print(markdown(results), end="")
    return 0


def _record(args: argparse.Namespace, model_dir: Path, results: Sequence[Accuracy]) -> dict[str, Any]:
    return {
        "machine": machine(),
        # of a converted model it holds the source's digest
        "model": model_dir.name,
        "text": {
            "file": args.text.name,
            "sha256": file_sha256(args.text),
            "num_predicted": results[0].text.num_predicted,
            "window_tokens": WINDOW_TOKENS,
            "chunk_tokens": CHUNK_TOKENS,
        },
        "answers": {"num_prompts": len(PROMPTS), "max_tokens": ANSWER_TOKENS},
        "results": [asdict(one) for one in results],
    }


def _encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    return tokenizer.encode_chat([{"role": "user", "content": prompt}])


def _say(words: str) -> None:
    print(words, file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    text = Path(str(resources.files("noria_bench") / "texts" / "founding_documents.txt"))
    parser.add_argument("--output", type=Path, metavar="FILE", help="keep the results as JSON")
    parser.add_argument("--variant", action="append", metavar="NAME:KEY=VALUE,...", help="in place of the usual ones")
    parser.add_argument("--text", type=Path, default=text, metavar="FILE", help="for the perplexity")
    parser.add_argument("--model", default=EMBEDDED_MODEL, help="a directory or .gguf file (default: the embedded one)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
