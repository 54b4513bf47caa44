"""Which tokens Engram takes for the same: a map from token ids to fewer, compressed ids.

Tokens whose texts differ only in case, accents, compatibility forms or surrounding white space share a compressed id. The map is
not part of a checkpoint: it is rebuilt from the tokenizer. Source: specification section 10.1.
"""

import torch
from tokenizers import Regex, normalizers

from deepinfer.config import ModelConfig
from deepinfer.dims import Int, Tensor
from deepinfer.errors import TokenizerError
from deepinfer.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
# Stands for a lone space while both ends are stripped.
_KEPT_SPACE = "\ue000"


def build_normalizer() -> normalizers.Normalizer:
    """What two texts must have in common to be taken for the same.

    Accents are all characters of category M, not only Mn; `Strip` leaves U+001C to U+001F, which Python's `str.strip` removes.
    """
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _KEPT_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_KEPT_SPACE, " "),
        ]
    )


def build_token_map(tokenizer: Tokenizer, config: ModelConfig) -> Int[Tensor, " V"]:
    """Compressed id of every token id, numbered by first appearance in id order.

    Dtype: int64, on the CPU.
    Raises: TokenizerError if the tokenizer has not `config.vocab_size` tokens, or gives another number of compressed ids than
        `config.engram.compressed_vocab_size`. A model without Engram layers expects no number.
    """
    tokenizer.check_against(config)
    normalizer = build_normalizer()
    # Vocabulary strings and normalised texts share one table of keys, and so may meet.
    compressed_id_of: dict[str, int] = {}
    token_map: list[int] = []
    for token_id in range(len(tokenizer)):
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        # Bytes that are no text by themselves are told apart by their spelling, and an empty normal form by the text.
        key = tokenizer.token(token_id) if _REPLACEMENT in text else normalizer.normalize_str(text) or text
        token_map.append(compressed_id_of.setdefault(key, len(compressed_id_of)))
    expected = config.engram.compressed_vocab_size
    if config.engram.layer_ids and len(compressed_id_of) != expected:
        raise TokenizerError(
            f"{tokenizer.where} gives {len(compressed_id_of)} compressed ids, but config.json says engram_compressed_vocab_size "
            f"{expected}: take both files from the same checkpoint"
        )
    return torch.tensor(token_map, dtype=torch.int64, device="cpu")
