"""A finished chat as the dictionary that OpenAI's API answers with, with DeepSeek's keys for reasoning."""

import time
from typing import Any

from deepinfer.chat.recipe import RenderedPrompt
from deepinfer.outputs import CompletionOutput, Logprob, RequestOutput
from deepinfer.sampling_params import SamplingParams
from deepinfer.tokenizer import Tokenizer


def chat_completion(
    output: RequestOutput, prompt: RenderedPrompt, params: SamplingParams, *, model: str, tokenizer: Tokenizer
) -> dict[str, Any]:
    """A `chat.completion`. All counts are of the tokens in the output.

    `system_fingerprint` names what the answer depends on beside the request. A `finish_reason` may also be "abort".
    """
    reasoning = [_num_reasoning_tokens(completion, prompt, tokenizer) for completion in output.outputs]
    num_prompt, num_completion = len(output.prompt_token_ids), sum(len(c.token_ids) for c in output.outputs)
    return {
        "id": f"chatcmpl-{output.request_id}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": f"deepinfer-{prompt.encoding_version}-{output.precision}",
        "choices": [_choice(c, num, params, tokenizer) for c, num in zip(output.outputs, reasoning, strict=True)],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
            "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": sum(reasoning)},
        },
    }


def _choice(completion: CompletionOutput, num_reasoning: int, params: SamplingParams, tokenizer: Tokenizer) -> dict[str, Any]:
    message = completion.message
    assert message is not None
    logprobs = None
    if completion.logprobs is not None:
        asked = params.logprobs or 0
        # -1 is the whole vocabulary.
        num_top = tokenizer.vocab_size if asked == -1 else asked
        entries = [
            _token_logprob(token_id, around, num_top, tokenizer)
            for token_id, around in zip(completion.token_ids, completion.logprobs, strict=True)
        ]
        logprobs = {"content": entries[num_reasoning:]}
        if message.reasoning_content is not None:
            logprobs["reasoning_content"] = entries[:num_reasoning]
    has_called = completion.finish_reason == "stop" and message.tool_calls
    return {
        "index": completion.index,
        "message": message.to_dict(),
        "logprobs": logprobs,
        "finish_reason": "tool_calls" if has_called else completion.finish_reason,
    }


def _num_reasoning_tokens(completion: CompletionOutput, prompt: RenderedPrompt, tokenizer: Tokenizer) -> int:
    """Tokens before `</think>`, or all but the one that ended an answer that never came to it."""
    if prompt.response_start not in ("reasoning", "continued_reasoning"):
        return 0
    ends = {tokenizer.backend.token_to_id(marker) for marker in ("</think>", "<｜end▁of▁sentence｜>")}
    return next((i for i, token_id in enumerate(completion.token_ids) if token_id in ends), len(completion.token_ids))


def _token_logprob(token_id: int, around: dict[int, Logprob], num_top: int, tokenizer: Tokenizer) -> dict[str, Any]:
    def entry(token_id: int) -> dict[str, Any]:
        found = around[token_id]
        return {"token": found.decoded_token, "logprob": found.logprob, "bytes": list(tokenizer.token_bytes(token_id))}

    top = sorted((found.rank, other) for other, found in around.items() if found.rank is not None and found.rank <= num_top)
    return {**entry(token_id), "top_logprobs": [entry(other) for _, other in top]}
