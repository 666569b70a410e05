"""Python's operators, by the names of the methods that torch has for them."""

IN_PLACE = {
    **{f"__i{name}__": f"{name}_" for name in ("add", "sub", "mul", "div", "pow")},
    **{f"__i{name}__": f"bitwise_{name}_" for name in ("and", "or", "xor")},
    **{"__itruediv__": "div_", "__ifloordiv__": "floor_divide_", "__imod__": "remainder_"},
    **{"__ilshift__": "bitwise_left_shift_", "__irshift__": "bitwise_right_shift_"},
}
_BOTH_SIDES = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
_ONE_SIDE = ("neg", "pos", "abs", "invert")
OPERATORS = (
    *(f"__{side}{name}__" for name in (*_BOTH_SIDES, "matmul") for side in ("", "r")),
    *("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"),
    *(f"__{name}__" for name in _ONE_SIDE),
    *IN_PLACE,
)  # that views hand on
# Those that treat entries alike, and the older names that torch has of some, without their underscores.
ENTRY_OPERATORS = {f"{side}{name}" for name in (*_BOTH_SIDES, "div", "lshift", "rshift") for side in ("", "r")} | {
    *_ONE_SIDE
}
