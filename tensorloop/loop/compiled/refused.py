"""Why a loop is not compiled."""

from tensorloop._common.user_line import Place


class Refused(Exception):
    """Why a body is not compiled, and the file and line that say so."""

    def __init__(self, reason: str, place: Place | None = None) -> None:
        super().__init__(reason)
        self.reason, self.place = reason, place
