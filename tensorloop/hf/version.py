"""Which versions of transformers this room knows; looked at before anything of theirs is used."""

import warnings

try:
    import transformers
    from transformers import cache_utils
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ModuleNotFoundError(
        "tensorloop.hf needs transformers: pip install 'tensorloop[hf]'", name="transformers"
    ) from None

OLDEST, NEWEST = (5, 20), (5, 24)  # that the tests have run with
_USED = (
    *("Cache", "CacheLayerMixin", "DynamicCache", "DynamicLayer", "DynamicSlidingWindowLayer", "EncoderDecoderCache"),
    *("DYNAMIC_LAYER_TYPE_MAPPING", "get_layer_types_and_kwargs"),
)
# What a layer of a cache must have; a method that is not among these is one that ours lack.
_METHODS = {"get_mask_sizes", "get_max_length", "get_seq_length", "lazy_initialization", "update"}


def check_version() -> None:
    """Raises ImportError where transformers is too old, or has another kind of caches."""
    got = transformers.__version__
    version = tuple(map(int, got.split(".")[:2]))
    if version < OLDEST:
        raise ImportError(
            f"tensorloop.hf needs transformers {_said(OLDEST)} or newer, got {got}: pip install -U transformers"
        )
    gone = [name for name in _USED if not hasattr(cache_utils, name)]
    more = [] if gone else sorted(set(cache_utils.CacheLayerMixin.__abstractmethods__) - _METHODS)
    if gone or more:
        what = f"no {', '.join(gone)}" if gone else f"layers with {', '.join(more)}"
        raise ImportError(
            f"tensorloop.hf does not know the caches of transformers {got}, which has {what}: install a version from "
            f"{_said(OLDEST)} to {_said(NEWEST)}"
        )
    if version > NEWEST:
        warnings.warn(
            f"tensorloop.hf was tried with transformers {_said(OLDEST)} to {_said(NEWEST)}, and {got} is installed: "
            "look for a newer tensorloop, or compare with model.generate()",
            stacklevel=2,
        )


def _said(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
