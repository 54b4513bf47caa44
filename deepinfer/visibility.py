"""From where a token of a prompt can be read: a statement about the config, without weights.

A layer reads a token directly in two ways: as a raw row while it is in the query's window, and as part of a compressed entry that
the indexer selects. What reaches a query through the residual streams of tokens in between is not meant here.
Source: specification sections 1 (layer map), 8.2, 8.3, 8.6 and 8.7.
"""

from dataclasses import dataclass

from deepinfer.config import ModelConfig, check


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenVisibility:
    """Query positions of one layer that read one token; ranges are half-open and end with the prompt.

    Attributes:
        window: queries that read the raw row, the token's own among them.
        entry: id of the compressed entry that holds the token; None in a layer without entries.
        selectable: queries that see that entry: the group it stands for is complete.
        certain: those of them that select it whatever its score, because no more entries are visible than may be selected.
        filtered: those of them for which the candidate source may have dropped the entry before this layer's index source chose.
        kv_source: layer that compressed the token into the entry.
        index_source: layer whose selection this layer uses.
    """

    window: range
    entry: int | None = None
    selectable: range = range(0)
    certain: range = range(0)
    filtered: range = range(0)
    kv_source: int | None = None
    index_source: int | None = None


def token_visibility(config: ModelConfig, layer: int, token: int, length: int) -> TokenVisibility:
    """Which queries of a prompt of `length` tokens read the token at position `token` in backbone layer `layer`.

    Raises: ConfigError if the layer, the token or the length does not exist.
    """
    check(0 <= layer < config.n_layers, "layer", layer, f"the backbone has the layers 0 to {config.n_layers - 1}")
    check(1 <= length <= config.max_seq_len, "length", length, f"must lie between 1 and {config.max_seq_len}")
    check(0 <= token < length, "token", token, f"outside a prompt of {length} tokens")
    window = range(token, min(token + config.attention.window_size, length))
    ratio = config.compress_ratios[layer]
    if not ratio:
        return TokenVisibility(window=window)
    ix, index_source = config.indexer, config.index_source(layer)
    entry = token // ratio
    first = _first_to_see(entry + 1, ratio)
    is_filtered = 0 <= ix.candidate_source_layer < index_source
    # As long as all visible entries fit into the candidate blocks, all of them are candidates.
    bites = _first_to_see(ix.candidate_topk_blocks * ix.candidate_block_size + 1, ratio) if is_filtered else length
    chooses = _first_to_see(ix.topk + 1, ratio)
    return TokenVisibility(
        window=window,
        entry=entry,
        selectable=_queries(first, length, length),
        certain=_queries(first, min(chooses, bites), length),
        filtered=_queries(max(first, bites), length, length),
        kv_source=config.kv_source(layer),
        index_source=index_source,
    )


def _first_to_see(entries: int, ratio: int) -> int:
    """The first query that sees so many entries: their last group ends with its own token."""
    return entries * ratio - 1


def _queries(start: int, stop: int, length: int) -> range:
    """The positions from `start` to below `stop` that a prompt of `length` tokens has."""
    start = min(start, length)
    return range(start, max(start, min(stop, length)))
