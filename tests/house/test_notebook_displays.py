"""What a notebook shows of arrays and packed tensors; hypotheses and memory results have tests of their own."""

import re

import pytest
import torch

import tensorloop as tl


def cells(page: str) -> dict[str, str]:
    return dict(re.findall(r"<tr><td class=text>([^<]+)</td><td class=text>([^<]*)</td></tr>", page))


def test_an_array_shows_what_it_holds():
    array = tl.TensorArray()
    assert cells(array._repr_html_()) == {
        "slots": "0", "element_shape": "None", "dtype": "None", "device": "None", "bytes held": "0",
        "requires_grad": "False",
    }  # fmt: skip
    array.append(torch.ones(2, 3, requires_grad=True))
    shown = cells(array._repr_html_())
    assert (shown["slots"], shown["element_shape"], shown["requires_grad"]) == ("1", "(2, 3)", "True")
    assert shown["bytes held"] == f"{array.nbytes:,}"


def test_an_array_with_holes_says_so():
    array = tl.TensorArray(element_shape=(2,), dtype=torch.float32, capacity=4).write(2, torch.ones(2))
    assert cells(array._repr_html_())["slots"] == "3, of which 2 are holes"


@pytest.mark.parametrize(("lens", "entries"), [([3, 0, 5], "8 of 15 when padded"), ([0], "0"), ([], "0")])
def test_a_packed_tensor_shows_its_rows(lens: list[int], entries: str):
    page = tl.PackedTensor(torch.zeros(sum(lens), 2), lens)._repr_html_()
    assert cells(page)["entries"] == entries
    assert re.findall(r"title=(\d+)", page) == [str(n) for n in lens]


def test_of_many_rows_the_first_are_shown():
    page = tl.PackedTensor(torch.zeros(300), [10] * 30)._repr_html_()
    assert page.count("title=") == 24
    assert "6 more rows" in page


def test_looking_at_an_array_changes_nothing():
    x = torch.ones(3, requires_grad=True)
    array = tl.TensorArray().append(x).append(2 * x)
    array._repr_html_()
    (grad,) = torch.autograd.grad(array.stack().sum(), x)
    assert grad.tolist() == [3, 3, 3]
