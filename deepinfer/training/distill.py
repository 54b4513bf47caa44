"""Train the draft blocks on the frozen, rounded backbone: each draft learns the backbone's distribution at its position.

Drafts are used while all earlier ones were what the backbone would have said. So the loss counts fully where the text itself
is the backbone's greedy continuation so far, and a little elsewhere; later drafts count less, because fewer steps reach them.
The Markov head reads the true previous token. The confidence head learns, on what it is given and without moving it, whether
the draft equals the backbone's choice when all earlier ones did.
"""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from deepinfer.config_json import config_to_json
from deepinfer.dims import Float, Int, Tensor
from deepinfer.errors import ConfigError
from deepinfer.model.transformer import Transformer
from deepinfer.tokenizer import Tokenizer
from deepinfer.training.data import Windows, load_ids, step_generator
from deepinfer.training.draft_forward import DraftReading
from deepinfer.training.optimizer import Optimizers, schedule
from deepinfer.training.pretrain import BIAS_SPEED, add_common_options, build_model
from deepinfer.training.qat import set_rounding
from deepinfer.training.run import TrainingRun, first_step_compiled, prepare_device
from deepinfer.training.whole_sequence import WholeSequence

ANCHORS = 256  # of each sequence
STRAY_WEIGHT = 0.15  # of drafts whose text has left the backbone's greedy path
LATER_WEIGHT = 0.85  # of each draft, relative to the one before it
HARD_SHARE = 0.3  # of the loss that asks for the backbone's first choice, rather than its distribution


class DraftLosses(NamedTuple):
    draft: Float[Tensor, ""]
    confidence: Float[Tensor, ""]
    accepted: Float[Tensor, " Q"]  # share of drafts that equal the backbone's choice, where all earlier ones did


def draft_losses(
    model: Transformer,
    hidden: Float[Tensor, "BA Q D"],
    plain_logits: Float[Tensor, "BA Q V"],
    teacher: Float[Tensor, "BA Q V"],
    previous: Int[Tensor, "BA Q"],
    targets: Int[Tensor, "BA Q"],
) -> DraftLosses:
    """Losses of all drafts.

    Args:
        hidden, plain_logits: see `DraftOutput`.
        teacher: the backbone's logits for the drafted positions, given the true tokens before them.
        previous: the true token before each drafted position.
        targets: the true token at each drafted position.
    """
    last = model.mtp.blocks[-1]
    markov = F.embedding(previous, last.markov_head.embed.weight)
    logits = plain_logits + last.markov_head.head(markov.flatten(0, 1)).view_as(plain_logits)
    log_q, choice = torch.log_softmax(logits, dim=-1), teacher.argmax(dim=-1)
    soft = -(torch.softmax(teacher, dim=-1) * log_q).sum(dim=-1)
    hard = -log_q.gather(-1, choice[..., None]).squeeze(-1)
    on_path = _before(choice == targets)
    later = LATER_WEIGHT ** torch.arange(targets.shape[1], device=targets.device)
    weight = torch.where(on_path, 1.0, STRAY_WEIGHT) * later
    draft = (((1 - HARD_SHARE) * soft + HARD_SHARE * hard) * weight).sum() / weight.sum()

    agrees = logits.argmax(dim=-1) == choice
    # Reached: the text follows the backbone, and so did every earlier draft.
    reached = on_path & _before(agrees)
    inputs = torch.cat((hidden, markov.to(hidden.dtype)), dim=-1).detach()
    guess = last.confidence_head.proj(inputs.flatten(0, 1)).view(agrees.shape)
    terms = F.binary_cross_entropy_with_logits(guess, agrees.float(), reduction="none")
    confidence = (terms * reached).sum() / reached.sum().clamp(min=1)
    accepted = (agrees & reached).sum(dim=0) / reached.sum(dim=0).clamp(min=1)
    return DraftLosses(draft, confidence, accepted)


def _before(holds: Tensor) -> Tensor:
    """Whether it held at all earlier places of a row."""
    held = holds.long().cumprod(dim=1).bool()
    return torch.cat((torch.ones_like(held[:, :1]), held[:, :-1]), dim=1)


class Distillation:
    """The step of this stage."""

    def __init__(self, model: Transformer, windows: Windows, seed: int, fast: bool) -> None:
        self.model, self.windows, self.seed = model, windows, seed
        self.use(fast)

    def use(self, fast: bool) -> None:
        """Choose compiled or plain pieces. Mutates this object."""
        self.reading = DraftReading(WholeSequence(self.model, fast))
        self.losses = torch.compile(draft_losses, dynamic=False) if fast else draft_losses

    def gradients(self, step: int) -> tuple[DraftLosses, dict[int, Float[Tensor, " E"]]]:
        """Forward of both, backward of the drafts. Mutates gradients."""
        ids, size = self.windows.at(step)[:, :-1], self.model.config.draft.block_size
        b, t = ids.shape
        generator = step_generator(self.seed, step)
        # Drafted positions end at p + Q + 1, the last one that has a true token.
        anchors = torch.randperm(t - size - 1, generator=generator)[:ANCHORS].sort().values.to(ids.device)
        with torch.no_grad():
            main = self.reading.backbone(ids)
            assert main.main_hidden is not None
            drafted = anchors[:, None] + 2 + torch.arange(size, device=ids.device)
            before = main.final.unflatten(0, (b, t))[:, drafted - 1].flatten(0, 2)
            teacher = self.model.logits(before).view(b * anchors.shape[0], size, -1)
        output = self.reading(ids, main.main_hidden, anchors)
        previous, targets = ids[:, drafted - 1].flatten(0, 1), ids[:, drafted].flatten(0, 1)
        losses = self.losses(self.model, output.hidden, output.plain_logits, teacher, previous, targets)
        (losses.draft + losses.confidence).backward()
        return losses, output.loads

    def step(self, run: TrainingRun, step: int) -> dict[str, Any]:
        losses, loads = self.gradients(step)
        factor = schedule(run.done)
        values = {"loss": losses.draft.detach(), "confidence": losses.confidence.detach(), "norm": run.optimizers.step(factor)}
        with torch.no_grad():
            for index, load in loads.items():
                self.model.mtp.blocks[index].ffn.gate.bias.add_(BIAS_SPEED * max(factor, 0.1) * torch.sign(load.mean() - load))
        # Tokens of a greedy step: the bonus token and the drafts before the first that is refused.
        values["tokens"] = 1 + losses.accepted.cumprod(dim=0).sum()
        return values | {f"accept{i}": share for i, share in enumerate(losses.accepted, 1)}


def load_backbone(model: Transformer, path: Path) -> None:
    """Take the backbone of a finished `pretrain.pt`. Mutates `model`."""
    if not path.exists():
        raise ConfigError(f"{path}: no such state. Run `python -m deepinfer.training.pretrain` first.")
    state = torch.load(path, map_location=model.device, weights_only=True)
    if state["config"] != config_to_json(model.config):
        raise ConfigError(f"{path} is the state of another architecture")
    if state["step"] != state["steps"]:
        raise ConfigError(f"{path} stopped at step {state['step']} of {state['steps']}. Run the same command again.")
    model.load_state_dict(state["model"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_options(parser)
    parser.set_defaults(rate=4e-3)
    parser.add_argument("--backbone", type=Path, metavar="FILE", help="finished pre-training (default OUT/pretrain.pt)")
    options = parser.parse_args()
    device = torch.device(options.device)
    dtype = prepare_device(device)
    fast = device.type == "cuda" if options.compile is None else options.compile
    model = build_model(Tokenizer.from_folder(options.data), device, dtype, options.seed)
    load_backbone(model, options.backbone or options.out / "pretrain.pt")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("mtp.") and not name.endswith("gate.bias"))
    # The export rounds the draft blocks as well; on a frozen, rounded backbone they meet all roundings from the start.
    set_rounding(model, True)
    optimizers = Optimizers(model.named_parameters(), options.rate)
    windows = Windows(load_ids(options.data, "train").to(device), options.batch, options.length, options.seed + 1)
    stage = Distillation(model, windows, options.seed, fast)

    def try_step(fast: bool) -> None:
        stage.gradients(0)
        model.zero_grad(set_to_none=True)

    stage.use(first_step_compiled(try_step, fast))
    run = TrainingRun("distill", options.out, model, optimizers, options.steps, options.minutes)
    run.resume()
    limit = options.stop_after * 60 if options.stop_after else None
    complete = run.loop(lambda step: stage.step(run, step), limit)
    print(f"{'complete' if complete else 'stopped'} at step {run.step} of {run.steps}: {run.path}")


if __name__ == "__main__":
    main()
