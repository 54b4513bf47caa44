"""Learn a byte-level BPE from the training part of the corpus and turn both parts into token ids.

`tokenizer.json` and `tokenizer_config.json` have the layout of the published ones (specification, section 15) with a
smaller vocabulary: the ids 0, 1 and 2, then the 256 bytes, then the merges, then the other control tokens. One part
differs, the split before the merges, where Python asks for more than prose: see `PYTHON_SPACE`.
"""

import argparse
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import tokenizers
from tokenizers import pre_tokenizers, trainers
from tqdm import tqdm

from deepinfer.errors import TokenizerError
from deepinfer.tokenizer import Tokenizer
from deepinfer.training.corpus import Document, Source, corpus_digest, find_sources, read_documents, read_manifest


class ControlToken(NamedTuple):
    content: str
    # Special tokens are skipped when text is decoded for a reader.
    special: bool
    # Matched in the normalised text. The normaliser is empty, so this changes nothing; kept as published.
    normalized: bool


BOS = ControlToken("<｜begin▁of▁sentence｜>", True, False)
EOS = ControlToken("<｜end▁of▁sentence｜>", True, False)
PAD = ControlToken("<｜▁pad▁｜>", True, False)
FIRST_TOKENS = (BOS, EOS, PAD)
# `<｜System｜>` is also what the draft blocks read where no token is known yet. Only the image token is not normalised.
_LAST_NAMES = """
    <｜System｜> <｜User｜> <｜Assistant｜> <think> </think> ｜DSML｜ <｜latest_reminder｜> <｜action｜> <｜query｜>
    <｜authority｜> <｜domain｜> <｜title｜> <｜read_url｜> <｜deepseek_image｜>"""
LAST_TOKENS = tuple(ControlToken(name, False, name != "<｜deepseek_image｜>") for name in _LAST_NAMES.split())
BOS_ID, EOS_ID = 0, 1
NUM_BYTES = 256
MIN_VOCAB_SIZE = len(FIRST_TOKENS) + NUM_BYTES + len(LAST_TOKENS)
# Ids are stored as uint16.
MAX_VOCAB_SIZE = 2**16

# The three published splits. The third is cut in two here: words, and what is around them.
DIGITS = r"\p{N}{1,3}"
CJK = "[一-龥぀-ゟ゠-ヿ]+"
WORDS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|""" + "[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
PUBLISHED_SPACE = " ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
# A line break takes the indentation of the next line along, all but the last space, which goes with the word after it:
# "):\n        return" is `):\n       ` and ` return`, two tokens where the published split needs three.
# Bytes per token on held-out text, 4096 tokens learned from a fifth of the training part:
#   3.49  published
#   3.55  only line breaks outside punctuation take the whole indentation along; 3.56 all but the last space
#   3.64  only line breaks after punctuation take the whole indentation along
#   3.71  both take the whole indentation along; 3.72 all but the last space (this one)
#   3.72  this one, and a space before punctuation that begins a word
#   3.69  this one, and names with underscores kept whole
INDENT = "(?:[ \t]+(?= ))?"
PYTHON_SPACE = f" ?[\\p{{P}}\\p{{S}}]+(?:[\r\n]+{INDENT})?|\\s*[\r\n]+{INDENT}|\\s+(?!\\S)|\\s+"
SPLITS = {"published": WORDS + "|" + PUBLISHED_SPACE, "python": WORDS + "|" + PYTHON_SPACE}

Split = Literal["published", "python"]
Part = Literal["train", "held_out"]
# Beside the published two files: what the tokenizer was learned from, and what lies in the arrays of ids.
ORIGIN, INDEX = "tokenizer_origin.json", "ids.json"


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _layout(split: Split) -> dict[str, Any]:
    """All parts of tokenizer.json around the vocabulary, as published but for the third split."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    to_bytes = byte_level | {"add_prefix_space": False, "use_regex": False}
    splits = [_split(DIGITS), _split(CJK), _split(SPLITS[split]), to_bytes]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": {"type": "Sequence", "normalizers": []},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits},
        "post_processor": byte_level | {"trim_offsets": False},
        "decoder": byte_level,
    }


def learn_tokenizer(texts: Iterable[str], vocab_size: int, split: Split = "python") -> dict[str, Any]:
    """The content of tokenizer.json for exactly `vocab_size` tokens, control tokens included.

    The result depends on the texts alone, not on their order or the number of threads: merges are chosen by count and,
    among equal counts, by id.

    Raises: TokenizerError if the vocabulary cannot have that size, or the texts are too few to fill it.
    """
    if not MIN_VOCAB_SIZE <= vocab_size <= MAX_VOCAB_SIZE:
        raise TokenizerError(f"vocab_size is {vocab_size}; it must be from {MIN_VOCAB_SIZE} to {MAX_VOCAB_SIZE}.")
    layout = _layout(split)
    learner = tokenizers.Tokenizer.from_str(json.dumps(layout | {"model": {"type": "BPE", "vocab": {}, "merges": []}}))
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(LAST_TOKENS),
        special_tokens=[token.content for token in FIRST_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    learner.train_from_iterator(texts, trainer)
    model = json.loads(learner.to_str())["model"]
    if len(model["vocab"]) + len(LAST_TOKENS) != vocab_size:
        learned = len(model["merges"])
        raise TokenizerError(f"The texts gave only {learned} merges, too few for {vocab_size} tokens. Ask for fewer.")
    # Published files write a merge as one string; no token of a byte-level vocabulary has a space in it.
    model["merges"] = [" ".join(pair) for pair in model["merges"]]
    first_of_last = vocab_size - len(LAST_TOKENS)
    ids = [*range(len(FIRST_TOKENS)), *range(first_of_last, vocab_size)]
    plain = {"single_word": False, "lstrip": False, "rstrip": False}
    added = [
        {"id": token_id, "content": token.content} | plain | {"normalized": token.normalized, "special": token.special}
        for token_id, token in zip(ids, FIRST_TOKENS + LAST_TOKENS, strict=True)
    ]
    return layout | {"added_tokens": added, "model": model}


def tokenizer_settings(model_max_length: int) -> dict[str, Any]:
    """The content of tokenizer_config.json. Padding is done with EOS there, and the flags differ, both as published."""

    def token(content: str) -> dict[str, Any]:
        flags = {"lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
        return {"__type": "AddedToken", "content": content} | flags

    return {
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": token(BOS.content),
        "clean_up_tokenization_spaces": False,
        "eos_token": token(EOS.content),
        "legacy": True,
        "model_max_length": model_max_length,
        "pad_token": token(EOS.content),
        "sp_model_kwargs": {},
        "unk_token": None,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def _digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None


def _read_record(path: Path) -> dict[str, Any]:
    """What an earlier run left, or nothing if it left none or it is damaged; the run then starts over."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _write_json(path: Path, content: dict[str, Any], indent: int = 2) -> None:
    # Written beside and renamed, so that an interrupted run leaves no half file.
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, ensure_ascii=False, indent=indent) + "\n", encoding="utf-8")
    os.replace(partial, path)


def write_tokenizer(
    corpus: Path,
    out: Path,
    vocab_size: int = 4096,
    split: Split = "python",
    model_max_length: int = 4096,
    sources: list[Source] | None = None,
) -> Tokenizer:
    """Learn the tokenizer from the training part and write its files, unless `out` has them from the same inputs."""
    manifest = read_manifest(corpus)
    origin = {"corpus": corpus_digest(manifest), "vocab_size": vocab_size, "split": split}
    file = out / "tokenizer.json"
    out.mkdir(parents=True, exist_ok=True)
    if _read_record(out / ORIGIN) != origin | {"sha256": _digest(file)}:
        documents = read_documents(manifest, "train", sources)
        documents = tqdm(documents, total=len(manifest["train"]), desc="learn tokens", unit="file", disable=None)
        _write_json(file, learn_tokenizer((document.text for document in documents), vocab_size, split))
        _write_json(out / ORIGIN, origin | {"sha256": _digest(file)})
    _write_json(out / "tokenizer_config.json", tokenizer_settings(model_max_length))
    return Tokenizer.from_folder(out)


def encode_documents(tokenizer: Tokenizer, documents: Iterable[Document]) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """Returns: the ids (uint16) of all documents, each as BOS, text, EOS; and where each document lies among them.

    `start` and `end` count ids, BOS and EOS included; `bytes` is the length of the text. A control token that stands in
    a source file is text like any other there, so that BOS and EOS appear at the ends of documents only.
    """
    arrays, index, start = [], [], 0
    for document in documents:
        ids = [BOS_ID, *tokenizer.encode(document.text, split_special_tokens=True), EOS_ID]
        arrays.append(np.array(ids, dtype=np.uint16))
        span = {"start": start, "end": start + len(ids), "bytes": len(document.text.encode())}
        index.append({"package": document.package, "path": document.path} | span)
        start += len(ids)
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.uint16), index


def write_ids(corpus: Path, out: Path, sources: list[Source] | None = None) -> dict[str, Any]:
    """Write `train.npy`, `held_out.npy` and `ids.json`, unless `out` has them for this corpus and this tokenizer.

    Returns: the content of ids.json: for each part the totals, the sha256 of its array and the span of each document.
    """
    manifest = read_manifest(corpus)
    tokenizer = Tokenizer.from_folder(out)
    if len(tokenizer) > MAX_VOCAB_SIZE:
        raise TokenizerError(f"{out} has {len(tokenizer)} tokens; uint16 ids allow {MAX_VOCAB_SIZE} at most.")
    origin = {"corpus": corpus_digest(manifest), "tokenizer": _digest(out / "tokenizer.json")}
    record = _read_record(out / INDEX)
    parts: tuple[Part, Part] = ("train", "held_out")
    if record.get("origin") == origin and all(record[part]["sha256"] == _digest(out / f"{part}.npy") for part in parts):
        return record
    sources = sources or find_sources()[0]
    record = {"origin": origin}
    for part in parts:
        documents = read_documents(manifest, part, sources)
        documents = tqdm(documents, total=len(manifest[part]), desc=f"encode {part}", unit="file", disable=None)
        ids, index = encode_documents(tokenizer, documents)
        path = out / f"{part}.npy"
        np.save(path, ids)
        size = sum(entry["bytes"] for entry in index)
        record[part] = {"ids": len(ids), "bytes": size, "sha256": _digest(path), "documents": index}
    # Last, so that an index is never older than its arrays.
    _write_json(out / INDEX, record, indent=1)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, metavar="DIR", help="folder with manifest.json")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the tokenizer and the ids")
    parser.add_argument("--vocab-size", type=int, default=4096, help="all tokens, control tokens too (default 4096)")
    parser.add_argument("--split", choices=sorted(SPLITS), default="python", help="third split (default python)")
    parser.add_argument("--max-length", type=int, default=4096, help="model_max_length to record (default 4096)")
    options = parser.parse_args()
    tokenizer = write_tokenizer(options.corpus, options.out, options.vocab_size, options.split, options.max_length)
    print(f"{options.out / 'tokenizer.json'}: {len(tokenizer)} tokens")
    record = write_ids(options.corpus, options.out)
    for part in ("train", "held_out"):
        entry = record[part]
        # BOS and EOS stand for no byte.
        tokens = entry["ids"] - 2 * len(entry["documents"])
        print(f"{part}: {entry['ids']} ids, {entry['bytes']} bytes, {entry['bytes'] / tokens:.3f} bytes per token")


if __name__ == "__main__":
    main()
