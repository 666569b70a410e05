"""Why a loop is not compiled."""

import traceback

from tensorloop._common.user_line import UserLine, is_ours

# What cures several.
VALUES = "keep values in tensors: torch.where chooses by them, table[i[None]][0] takes a row by one"
NATIVE = "write it with other operations, or before or after the loop, or set compile=False"
FUNCTION = "write what it gives as y + (s - s.detach()), which is y with the gradient of s, or set compile=False"
GAP = "set compile=False, and report it: this is a gap, not a rule"
CURE_OF_ERRORS = "set compile=False if the eager loop is right"

# What torch says of what stands for a number, where it takes numbers alone.
_STAND_INS = [
    ("NumberRead", ".item() reads a value in Python", VALUES),
    ("concrete integers", "an operation takes i, the number of the step, as a Python number", "torch.as_tensor(i)"),
]


class Refused(Exception):
    """Why a body is not compiled, what a user can do about it, and the file and line that say so."""

    def __init__(self, reason: str, cure: str, place: UserLine | None = None) -> None:
        super().__init__(reason)
        self.reason, self.cure, self.place = reason, cure, place

    def alone(self) -> "Refused":
        """A copy of the refusal without the frames it was raised in, to be kept, or raised again."""
        return Refused(self.reason, self.cure, self.place)


def of_error(error: BaseException) -> Refused:
    """An error that the look at a step met, and the user's line that it comes from; it holds no frames."""
    text = str(error).strip().partition("\n")[0]
    frames = [(f.f_code.co_filename, line) for f, line in traceback.walk_tb(error.__traceback__) if not is_ours(f)]
    place = frames[-1] if frames else None
    for what, reason, cure in _STAND_INS:
        if what in text:
            return Refused(reason, cure, place)
    said = f"looking at its step raised {type(error).__name__}" + (f": {text}" if text else "")
    return Refused(said, CURE_OF_ERRORS, place)
