"""tenuto: Transformers that decide, token by token, how deep, how wide and when to compute.

Names are imported when first used: `import tenuto` does not touch torch.
"""

__version__ = "0.1.0"

_HOMES = {
    "preset": "presets",
    "PRESETS": "presets",
    "build": "presets",
}


def __getattr__(name: str):
    from importlib import import_module

    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    models = import_module(".models", __name__) if name[:1].isupper() else None
    if models is not None and hasattr(models, name):
        return getattr(models, name)
    raise AttributeError(f"tenuto has no attribute {name!r}")
