"""Pieces of steps as PTX of the whole device: what LLVM makes of it, and where one kernel ends and the next begins."""

import re
import tempfile
from pathlib import Path

import pytest
import torch

from tensorloop.compiler.emitter.device import devices, piece
from tensorloop.compiler.emitter.device.devices import WholeNvptx
from tensorloop.compiler.emitter.device.piece import PieceText, piece_text
from tensorloop.compiler.emitter.lowered import lowered
from tensorloop.compiler.step import Step, Unsupported
from tensorloop.compiler.targets.cpu.object_cache import Folder
from tensorloop.compiler.targets.graphs.pieces import cut
from tensorloop.compiler.targets.ptx.assemble import ptx_of
from tests.support.ptx_checks import ARCHITECTURES, WRONG
from tests.support.recurrences import Body, recurrence
from tests.support.recurrent_cells import CELLS, inputs


def cell(name: str) -> Step:
    found = CELLS[name]
    return recurrence(found.step, *inputs(found, 3, 8, 32, torch.float32), reverse=found.reverse)


def text_of(body: Body, *carry: torch.Tensor) -> PieceText:
    """That of the one piece of a body."""
    (found,) = cut(recurrence(body, [], [torch.ones(1, 1)], carry)).pieces
    return piece_text(lowered(found.step), WholeNvptx("sm_90", groups=132))


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.extended(*(f"[{name}]" for name in [*CELLS][6:]))
def test_pieces_are_ptx(name: str) -> None:
    for arch in ARCHITECTURES:
        for one in cut(cell(name)).pieces:
            text = piece_text(lowered(one.step), WholeNvptx(arch, groups=132))
            for module in text.modules:
                with tempfile.TemporaryDirectory() as folder:
                    found = ptx_of(module, arch, Folder(Path(folder))).decode()
                assert f".maxntid {text.threads}" in found
                assert "shared" not in found
                assert "bar.sync" not in found
                for pattern in WRONG:
                    assert not (lines := [x for x in found.splitlines() if re.search(pattern, x)]), lines[:3]


def test_lanes_are_as_many_as_elements_in_blocks_for_all_multiprocessors() -> None:
    def body(inv: object, xs: object, carry: list[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
        return {"carry": [carry[0].sin() * 2]}

    found = [text_of(body, torch.ones(n)) for n in (1, 33, 8192, 10**5, 10**7)]
    assert [(x.blocks, x.threads) for x in found] == [(1, 32), (2, 32), (128, 64), (391, 256), (528, 256)]
    assert {len(x.modules) for x in found} == {1}
    assert {x.scratch for x in found} == {0}


def test_a_kernel_ends_where_one_lane_needs_what_another_made() -> None:
    def norm(inv: object, xs: object, carry: list[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
        (h,) = carry
        return {"carry": [h - h.cos().mean(1, keepdim=True)]}

    text = text_of(norm, torch.ones(8, 64))
    assert len(text.modules) == 3  # sums, what is made of them row by row, and the rest
    assert text.scratch > 0

    def turned(inv: object, xs: object, carry: list[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
        (h,) = carry
        return {"carry": [(h.cos() + 1).t() * h]}

    assert len(text_of(turned, torch.ones(8, 8)).modules) <= 2


def test_what_is_chosen_by_an_index_is_no_piece() -> None:
    step = recurrence(
        lambda inv, xs, carry: {"carry": [inv[0][carry[0]].sin() + 1, carry[1] + 1], "outs": []},
        [torch.ones(5)],
        [torch.ones(1, 1)],
        [torch.zeros(3, dtype=torch.int64), torch.zeros(3)],
    )
    with pytest.raises(Unsupported, match="in a kernel of the whole device"):
        piece_text(lowered(step), WholeNvptx("sm_90"))


def test_more_tensors_than_a_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert piece.MOST_ARGUMENTS == devices.MOST_ARGUMENTS
    monkeypatch.setattr(piece, "MOST_ARGUMENTS", 1)
    with pytest.raises(Unsupported, match="2 tensors, of which a kernel takes at most 1"):
        text_of(lambda inv, xs, carry: {"carry": [carry[0].sin() * 2]}, torch.ones(3))


def test_blocks_do_not_wait_for_each_other() -> None:
    with pytest.raises(AssertionError, match="do not wait"):
        WholeNvptx("sm_90").wait(None)  # pyright: ignore[reportArgumentType]
