"""Train the backbone on the token ids, and finish it under the roundings of the export.

The loss is next-token cross-entropy, plus the index losses (which move indexers only). Router biases follow the load. The
last part of the steps runs with every rounding of the export and of native inference (`qat.set_rounding`).
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from deepinfer.config import ModelConfig
from deepinfer.dims import Float, Int, Tensor
from deepinfer.model.transformer import Transformer
from deepinfer.token_map import build_normalizer, build_token_map
from deepinfer.tokenizer import Tokenizer
from deepinfer.training.data import Windows, load_ids, step_generator
from deepinfer.training.initialize import initialize
from deepinfer.training.mini_config import TRAIN_LENGTH, mini_config
from deepinfer.training.optimizer import Optimizers, schedule
from deepinfer.training.qat import build_trainable, set_rounding
from deepinfer.training.run import TrainingRun, first_step_compiled, prepare_device
from deepinfer.training.whole_sequence import Record, WholeSequence, layers_of

NOISE_TOKEN = "<｜System｜>"
IMAGE_TOKEN = "<｜deepseek_image｜>"
INDEX_ROWS = 64  # queries of each sequence that teach the indexers
BIAS_SPEED = 1e-3


def config_for(tokenizer: Tokenizer) -> ModelConfig:
    """`mini` for this tokenizer."""
    [noise] = tokenizer.encode(NOISE_TOKEN)
    compressed = len(compressed_ids(tokenizer))
    [image] = tokenizer.encode(IMAGE_TOKEN)
    return mini_config(len(tokenizer), compressed, noise, image)


def compressed_ids(tokenizer: Tokenizer) -> set[str]:
    """The keys of `build_token_map`, whose number the configuration must state."""
    normalizer = build_normalizer()
    keys = set()
    for token_id in range(len(tokenizer)):
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        keys.add(tokenizer.token(token_id) if "\ufffd" in text else normalizer.normalize_str(text) or text)
    return keys


def build_model(tokenizer: Tokenizer, device: torch.device, activation_dtype: torch.dtype, seed: int) -> Transformer:
    """A freshly initialised model that trains."""
    config = config_for(tokenizer)
    model = build_trainable(config, activation_dtype, device)
    initialize(model, seed)
    model.token_window.token_map = build_token_map(tokenizer, config).to(device)
    return model


def language_loss(model: Transformer, final: Float[Tensor, "T D"], targets: Int[Tensor, " T"]) -> Float[Tensor, ""]:
    return F.cross_entropy(model.logits(final), targets)


@torch.no_grad()
def balance_routers(model: Transformer, loads: dict[int, Float[Tensor, " E"]], speed: float) -> None:
    """Raise the biases of experts below the mean load, lower the others (`noaux_tc`). Mutates the router biases."""
    layers = layers_of(model)
    for index, load in loads.items():
        layers[index].ffn.gate.bias.add_(speed * torch.sign(load.mean() - load))


class Pretraining:
    """The step of this stage, with everything it needs."""

    def __init__(self, model: Transformer, windows: Windows, seed: int, fast: bool) -> None:
        self.model, self.windows, self.seed = model, windows, seed
        self.use(fast)

    def use(self, fast: bool) -> None:
        """Choose compiled or plain pieces. Mutates this object."""
        self.reading = WholeSequence(self.model, fast)
        self.loss = torch.compile(language_loss, dynamic=False) if fast else language_loss

    def gradients(self, step: int) -> tuple[dict[str, Any], dict[int, Float[Tensor, " E"]]]:
        """Forward and backward of one batch. Mutates gradients; returns losses and expert loads."""
        ids = self.windows.at(step)
        length = ids.shape[1] - 1
        rows = torch.randperm(length, generator=step_generator(self.seed, step))[: min(INDEX_ROWS, length)].sort().values
        output = self.reading(ids[:, :-1], record=Record(index_rows=rows.to(ids.device)))
        language = self.loss(self.model, output.final, ids[:, 1:].flatten())
        index = torch.stack(output.record.index_losses).sum() if output.record.index_losses else torch.zeros_like(language)
        (language + index).backward()
        return {"loss": language.detach(), "index": index.detach()}, output.record.loads

    def step(self, run: TrainingRun, step: int) -> dict[str, Any]:
        set_rounding(self.model, run.is_rounded)
        values, loads = self.gradients(step)
        factor = schedule(run.done)
        values["norm"] = run.optimizers.step(factor)
        balance_routers(self.model, loads, BIAS_SPEED * max(factor, 0.1))
        values["rate"] = factor
        values["load"] = torch.stack([load.max() / load.mean() for load in loads.values()]).max()
        return values


def benchmark(stage: Pretraining, optimizers: Optimizers, steps: int, out: Path) -> dict[str, Any]:
    """Seconds of the parts of a step, with and without rounding; nothing is saved but these figures."""
    device = stage.model.device

    def wait() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    figures: dict[str, Any] = {}
    for rounding in (False, True):
        set_rounding(stage.model, rounding)
        begun = wait()
        stage.gradients(0)
        optimizers.step(0.01)
        first = wait() - begun
        parts = {"gradients": 0.0, "update": 0.0}
        for step in range(steps):
            begun = wait()
            stage.gradients(step)
            middle = wait()
            optimizers.step(0.01)
            parts["gradients"] += (middle - begun) / steps
            parts["update"] += (wait() - middle) / steps
        tokens = stage.windows.batch * stage.windows.length
        figures["rounded" if rounding else "plain"] = parts | {"first": first, "tokens_per_s": tokens / sum(parts.values())}
    if device.type == "cuda":
        figures["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    (out / "benchmark.json").write_text(json.dumps(figures, indent=1))
    return figures


def add_common_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder with tokenizer.json, train.npy, ids.json")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for state and log")
    parser.add_argument("--minutes", type=float, help="set the number of steps so that the whole stage takes this long")
    parser.add_argument("--steps", type=int, help="number of steps, instead of --minutes")
    parser.add_argument("--stop-after", type=float, metavar="MIN", help="stop and save after this long; the same command resumes")
    parser.add_argument("--batch", type=int, default=32, help="sequences in a batch (default 32)")
    parser.add_argument("--length", type=int, default=TRAIN_LENGTH, help=f"tokens of a sequence (default {TRAIN_LENGTH})")
    parser.add_argument("--rate", type=float, default=8e-3, help="peak learning rate (default 0.008)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="fuse operations (default: on a GPU)")
    parser.add_argument("--rounded", type=float, default=0.15, help="share of the steps that run with rounding (default 0.15)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_options(parser)
    parser.add_argument("--benchmark", action="store_true", help="time 20 steps, with and without rounding, and stop")
    options = parser.parse_args()
    device = torch.device(options.device)
    dtype = prepare_device(device)
    fast = device.type == "cuda" if options.compile is None else options.compile
    model = build_model(Tokenizer.from_folder(options.data), device, dtype, options.seed)
    backbone = ((name, p) for name, p in model.named_parameters() if not name.startswith("mtp."))
    optimizers = Optimizers(backbone, options.rate)
    windows = Windows(load_ids(options.data, "train").to(device), options.batch, options.length, options.seed)
    stage = Pretraining(model, windows, options.seed, fast)

    def try_step(fast: bool) -> None:
        # Both kinds of steps, so that nothing is left to compile, or to fail, late in the run.
        for rounding in (True, False):
            set_rounding(model, rounding)
            stage.gradients(0)
            model.zero_grad(set_to_none=True)

    stage.use(first_step_compiled(try_step, fast))
    if options.benchmark:
        options.out.mkdir(parents=True, exist_ok=True)
        print(json.dumps(benchmark(stage, optimizers, 20, options.out), indent=1))
        return
    run = TrainingRun("pretrain", options.out, model, optimizers, options.steps, options.minutes, rounded_share=options.rounded)
    run.resume()
    limit = options.stop_after * 60 if options.stop_after else None
    complete = run.loop(lambda step: stage.step(run, step), limit)
    print(f"{'complete' if complete else 'stopped'} at step {run.step} of {run.steps}: {run.path}")


if __name__ == "__main__":
    main()
