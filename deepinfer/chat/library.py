"""The door to `deepseek_recipe`, which is imported when the first conversation comes."""

from types import ModuleType

from deepinfer.errors import MissingExtra


def load_library() -> ModuleType:
    """The module `deepseek_recipe`. Raises: MissingExtra if it is not installed."""
    try:
        import deepseek_recipe
    except ImportError as error:
        raise MissingExtra("chat needs deepseek-recipe: pip install 'deepinfer-reference[chat]'") from error
    return deepseek_recipe
