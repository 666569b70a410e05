"""Facts that are raised inside, and the errors that public functions make of them."""

import pytest

from tensorloop._common.errors import Fact, Misuse, WrongIndex, WrongType, WrongValue, named
from tensorloop._torch.eager_only import called_eagerly


@pytest.mark.parametrize(
    ("fact", "kind"),
    [(WrongType, TypeError), (WrongValue, ValueError), (WrongIndex, IndexError), (Misuse, RuntimeError)],
)
def test_a_fact_becomes_the_plain_error_with_the_functions_name(fact: type[Fact], kind: type[Exception]) -> None:
    @named("scan")
    def function() -> None:
        error = fact("xs[1] has 3 slices")
        error.add_note("a note")
        raise error

    with pytest.raises(kind, match=r"^scan: xs\[1\] has 3 slices") as raised:
        function()
    assert type(raised.value) is kind
    assert raised.value.__notes__ == ["a note"]
    assert raised.value.__suppress_context__  # one error is shown, not two


def test_the_cause_of_a_fact_stays() -> None:
    @named("scan")
    def function() -> None:
        try:
            int("x")
        except ValueError as error:
            raise WrongType("length must be an int") from error

    with pytest.raises(TypeError, match=r"^scan: length must be an int$") as raised:
        function()
    assert isinstance(raised.value.__cause__, ValueError)


def test_other_errors_pass_as_they_are() -> None:
    @named("scan")
    def function() -> None:
        raise ValueError("the body's own")

    with pytest.raises(ValueError, match=r"^the body's own$"):
        function()


def test_the_innermost_public_function_gives_the_name() -> None:
    @named("append")
    def inner() -> None:
        raise WrongType("value is a list")

    @named("scan")
    def outer() -> None:
        inner()

    with pytest.raises(TypeError, match=r"^append: value is a list$"):
        outer()


def test_what_keeps_one_named_function_from_the_compiler_is_no_mark_on_all() -> None:
    marked, other = (named(name)(lambda: None) for name in ("marked", "other"))
    assert called_eagerly(marked) is marked
    assert marked.__code__ is not other.__code__  # dynamo keeps the mark with the code
