"""Conversations in, prompts out; token ids out, answers in. Around DeepSeek's own `deepseek-recipe` (the extra `chat`).

messages -> `Recipe` -> segments -> `TokenAdder` -> token ids -> engine -> `CompletionReader` -> `ResponseParser` -> `ChatMessage`.
No torch.
"""
