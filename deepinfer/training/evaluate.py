"""Every figure about a trained checkpoint, on held-out modules only: one JSON file and one table.

Bits per byte come from the inference model in each precision; the ablations and expert loads from the training reading of the
same checkpoint, under all roundings.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from deepinfer.checkpoint.load import load_model
from deepinfer.errors import ConfigError
from deepinfer.tokenizer import Tokenizer
from deepinfer.training.data import HeldOutDocument, held_out_documents
from deepinfer.training.masters import masters_from_checkpoint
from deepinfer.training.pretrain import build_model
from deepinfer.training.run import prepare_device
from deepinfer.training.score import inference_forward, score_documents, training_forward, xz_bits_per_byte
from deepinfer.training.speculate import count_drafts
from deepinfer.training.whole_sequence import Ablation, WholeSequence

PRECISIONS = ("float32", "bfloat16", "native")
ABLATIONS = {
    "window_only": Ablation(entries="none"),
    "no_engram": Ablation(engram=False),
    "no_indexer": Ablation(entries="all"),
    "single_stream": Ablation(all_streams=False),
}
PROMPT_TOKENS = 256


def evaluate(options: argparse.Namespace, documents: list[HeldOutDocument], tokenizer: Tokenizer) -> dict[str, Any]:
    device = torch.device(options.device)
    sizes = (options.context, options.stride)
    result: dict[str, Any] = {"documents": len(documents), "bytes": sum(d.num_bytes for d in documents), "context": options.context}
    result["bits_per_byte"] = {}
    for precision in options.precisions:
        model = load_model(options.checkpoint, precision, device)
        score = score_documents(model, inference_forward(model), documents, *sizes, precision)
        result["bits_per_byte"][precision] = score.bits_per_byte
    result["bits_per_byte"]["xz -9"] = xz_bits_per_byte(documents, tokenizer)

    chosen = [name for name in ABLATIONS if getattr(options, name)]
    if chosen or options.loads:
        dtype = prepare_device(device)
        reading = WholeSequence(masters_from_checkpoint(options.checkpoint, dtype, device))
        whole = score_documents(reading.model, training_forward(reading, Ablation()), documents, *sizes, "training reading")
        result["training_reading"] = {"whole": whole.bits_per_byte}
        result["expert_load"] = {layer: float(load.max() / load.mean()) for layer, load in whole.loads.items()}
        for name in chosen:
            score = score_documents(reading.model, training_forward(reading, ABLATIONS[name]), documents, *sizes, name)
            result["training_reading"][name] = score.bits_per_byte
    # The training reading may have allowed TensorFloat-32; what follows must not use it.
    torch.set_float32_matmul_precision("highest")
    if options.state:
        result["bits_per_byte"]["masters, float32"] = score_state(options, documents, tokenizer)
    if options.prompts:
        model = load_model(options.checkpoint, "native", device)
        prompts = [document.ids[:PROMPT_TOKENS] for document in documents if document.ids.shape[0] > 2 * PROMPT_TOKENS]
        spread = prompts[:: max(len(prompts) // options.prompts, 1)][: options.prompts]
        result["draft"] = count_drafts(model, spread, options.new_tokens).summary()
    return result


def score_state(options: argparse.Namespace, documents: list[HeldOutDocument], tokenizer: Tokenizer) -> float:
    """Bits per byte of the float32 masters themselves, before any rounding: what quantisation is measured against."""
    device = torch.device(options.device)
    model = build_model(tokenizer, device, torch.float32, seed=0)
    model.load_state_dict(torch.load(options.state, map_location=device, weights_only=True)["model"])
    forward = training_forward(WholeSequence(model), Ablation())
    return score_documents(model, forward, documents, options.context, options.stride, "masters").bits_per_byte


def table(result: dict[str, Any]) -> str:
    """The figures as text."""
    lines = [f"held out: {result['documents']} files, {result['bytes']} bytes, windows of {result['context']} tokens", ""]
    lines += [f"{name:24} {value:.4f} bits per byte" for name, value in result["bits_per_byte"].items()]
    for name, value in result.get("training_reading", {}).items():
        lines.append(f"{'training reading, ' + name:34} {value:.4f} bits per byte")
    for layer, load in result.get("expert_load", {}).items():
        lines.append(f"layer {layer}: expert load max/mean {load:.2f}")
    if "draft" in result:
        draft = result["draft"]
        lines.append(f"draft: {draft['tokens_per_step']:.3f} tokens per step over {draft['steps']} steps")
        lines.append("acceptance by place, given all before: " + ", ".join(f"{rate:.3f}" for rate in draft["acceptance"]))
        lines.append("confidence: predicted, observed, drafts")
        lines += [f"  {row['predicted']:.3f}  {row['observed']:.3f}  {row['drafts']}" for row in draft["calibration"]]
    return "\n".join(lines)


def spread_limit(documents: list[HeldOutDocument], limit: int | None) -> list[HeldOutDocument]:
    """At most `limit` bytes in whole files, taken from all packages in turn; everything without a limit."""
    if limit is None:
        return documents
    by_package: dict[str, list[HeldOutDocument]] = defaultdict(list)
    for document in documents:
        by_package[document.package].append(document)
    chosen, total = [], 0
    for rank in range(max(map(len, by_package.values()))):
        for group in by_package.values():
            if rank < len(group) and total + group[rank].num_bytes <= limit:
                chosen.append(group[rank])
                total += group[rank].num_bytes
    if not chosen:
        raise ConfigError(f"no held-out file has at most {limit} bytes")
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="exported folder")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder with held_out.npy and ids.json")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON file; the table goes beside it as .txt")
    parser.add_argument("--state", type=Path, metavar="FILE", help="distill.pt or pretrain.pt: score its float32 masters, too")
    parser.add_argument("--precisions", nargs="*", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--context", type=int, default=2048, help="tokens of a window (default 2048)")
    parser.add_argument("--stride", type=int, default=1536, help="tokens a window scores (default 1536)")
    parser.add_argument("--limit-bytes", type=int, help="score about this much held-out text only")
    for name in ABLATIONS:
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true", help="score the training reading so ablated")
    parser.add_argument("--loads", action="store_true", help="expert loads by layer (comes with any ablation)")
    parser.add_argument("--prompts", type=int, default=0, help="held-out prompts for speculative decoding (default none)")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens to generate for each prompt (default 128)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    documents = spread_limit(held_out_documents(options.data), options.limit_bytes)
    result = evaluate(options, documents, Tokenizer.from_folder(options.data))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1))
    options.out.with_suffix(".txt").write_text(table(result) + "\n")
    print(table(result))


if __name__ == "__main__":
    main()
