"""Forbidden sequences against a search in plain Python."""

import random

import torch

from deepinfer.ops.bad_words import ANYTHING, NO_TOKEN, completed_tokens

VOCAB = 4


def completed(text: list[int], words: list[list[int]]) -> set[int]:
    return {token for token in range(VOCAB) for word in words if [*text, token][-len(word) :] == word}


def test_the_last_token_of_a_word_is_found_behind_the_others_and_nowhere_else() -> None:
    rng = random.Random(0)
    some = 0
    for _ in range(300):
        texts = [[rng.randrange(VOCAB) for _ in range(rng.randint(0, 6))] for _ in range(rng.randint(1, 4))]
        words = [[[rng.randrange(VOCAB) for _ in range(rng.randint(1, 4))] for _ in range(rng.randint(0, 3))] for _ in texts]
        width, count = rng.randint(3, 5), 3
        tails = torch.full((len(texts), width), NO_TOKEN)
        prefixes, last = torch.full((len(texts), count, width), ANYTHING), torch.full((len(texts), count), NO_TOKEN)
        for row, (text, own) in enumerate(zip(texts, words, strict=True)):
            tail = text[-width:]
            tails[row, width - len(tail) :] = torch.tensor(tail, dtype=torch.int64)
            for place, word in enumerate(own):
                prefixes[row, place, width - len(word) + 1 :] = torch.tensor(word[:-1], dtype=torch.int64)
                last[row, place] = word[-1]
        found = completed_tokens(tails, prefixes, last, VOCAB)
        expected = [completed(text, own) for text, own in zip(texts, words, strict=True)]
        assert [set(row.nonzero().flatten().tolist()) for row in found] == expected
        some += sum(map(len, expected))
    assert some > 300
