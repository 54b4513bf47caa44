"""Which tokens would complete a forbidden sequence of tokens."""

import torch

from deepinfer.dims import Bool, Int, Tensor

ANYTHING = -2  # in a prefix: every token, and none at all, agrees
NO_TOKEN = -1  # in a text: nothing stands there; as a last token: no sequence


def completed_tokens(
    texts: Int[Tensor, "n P"], prefixes: Int[Tensor, "n W P"], last: Int[Tensor, "n W"], vocab_size: int
) -> Bool[Tensor, "n V"]:
    """Tokens that would complete one of the W sequences of each row.

    Args:
        texts: the last P tokens of each row, `NO_TOKEN` in front of a shorter one.
        prefixes: the tokens before the last one of each sequence, `ANYTHING` in front of fewer.
        last: the last token of each sequence.
    """
    agrees = ((prefixes == ANYTHING) | (prefixes == texts[:, None])).all(dim=2) & (last != NO_TOKEN)
    rows = torch.arange(last.shape[0], device=last.device)[:, None].expand_as(last)
    counts = torch.zeros(last.shape[0], vocab_size, dtype=torch.int32, device=last.device)
    return counts.index_put_((rows, last.clamp(min=0)), agrees.to(torch.int32), accumulate=True) > 0
