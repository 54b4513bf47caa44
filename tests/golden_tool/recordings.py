"""Small models and recordings that the tests of the golden tools share."""

from functools import cache
from pathlib import Path
from typing import Any

import torch

from deepinfer.golden import Recording, record
from deepinfer.model.numerics import reference_ops
from deepinfer.model.transformer import Transformer
from deepinfer.presets import random_model, tiny_config
from deepinfer.sampling_params import SamplingParams

# Longer than the window, with more entries than are selected or kept as candidates.
PROMPT = torch.randint(3, 250, (44,), generator=torch.Generator().manual_seed(3)).tolist()
SHORT = PROMPT[5:18]
TWO_TOKENS = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
ALL = ("**",)


def fresh_model(precision: str = "float32", **ops: bool) -> Transformer:
    """`tiny_config()` with random weights, for tests that change or hook it."""
    return random_model(tiny_config(), precision=precision, ops=reference_ops(**ops))


@cache
def clean_model(precision: str = "float32") -> Transformer:
    """A model that tests share: not to be changed."""
    return fresh_model(precision)


def record_tiny(folder: Path, model: Transformer | None = None, prompts: Any = (PROMPT,), **options: Any) -> Recording:
    """A recording of token ids by a model, the shared one if None."""
    options = {"sampling_params": TWO_TOKENS, "patterns": ALL} | options
    return record(model or clean_model(), [{"prompt_token_ids": list(p)} for p in prompts], folder, **options)
