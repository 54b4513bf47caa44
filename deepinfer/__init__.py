"""A reference inference engine for DeepSeek-V4.1-Flash."""
