"""Parts of parameters: together they are the whole, element by element, whatever the shape and the number of ranks."""

from typing import Any

import pytest
import torch
from parity.ranks import run_ranks
from torch import Tensor

from mdlm_scale.parallel.cut import Cut, Place
from mdlm_scale.parallel.groups import Groups

SHAPES = [((7,), 0), ((8,), 0), ((7, 3), 0), ((6, 8), 1), ((1, 4), 0), ((5, 1), 0)]
SIZES = [1, 2, 4]


def places(whole: tuple[int, ...], dim: int, size: int) -> list[Place]:
    return [Place(torch.Size(whole), dim, rank, size) for rank in range(size)]


def numbered(whole: tuple[int, ...]) -> Tensor:
    """Every element is its own index, from 1 on: 0 is padding."""
    return 1 + torch.arange(torch.Size(whole).numel(), dtype=torch.float64).view(whole)


def ranges(numel: int) -> list[tuple[int, int]]:
    return [(start, length) for start in range(numel + 1) for length in range(numel - start + 1)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("whole", "dim"), SHAPES)
def test_parts_hold_every_element_once_and_else_padding(whole: tuple[int, ...], dim: int, size: int) -> None:
    parts = [place.part_of(numbered(whole)) for place in places(whole, dim, size)]
    assert torch.equal(torch.cat(parts, dim).narrow(dim, 0, whole[dim]), numbered(whole))
    assert all(part.is_contiguous() for part in parts)
    assert torch.cat([part.flatten() for part in parts]).count_nonzero() == numbered(whole).numel()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("whole", "dim"), SHAPES)
def test_boxes_of_any_range_are_its_elements_in_the_whole(whole: tuple[int, ...], dim: int, size: int) -> None:
    for place in places(whole, dim, size):
        part = place.part_of(numbered(whole)).flatten()
        for start, numel in ranges(part.numel()):
            found = torch.zeros_like(part)
            boxes = list(place.boxes(start, numel))
            assert len(boxes) <= 3
            for offset, lengths, at in boxes:
                box = numbered(whole)[tuple(slice(o, o + n) for o, n in zip(offset, lengths, strict=True))]
                assert list(box.shape) == lengths
                found[at : at + box.numel()] = box.flatten()
            assert torch.equal(found[start : start + numel], part[start : start + numel])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("whole", "dim"), SHAPES)
def test_initial_values_of_any_range_are_those_of_the_whole(whole: tuple[int, ...], dim: int, size: int) -> None:
    """And nobody asks for an element that is not its own."""
    asked: list[int] = []

    def of_whole(name: str, start: int, numel: int) -> Tensor:
        asked.append(numel)
        return numbered(whole).flatten()[start : start + numel]

    for place in places(whole, dim, size):
        part = place.part_of(numbered(whole)).flatten()
        init_range = Cut({"p": place}, size).init_range(of_whole)
        for start, numel in ranges(part.numel()):
            asked.clear()
            expected = part[start : start + numel]
            assert torch.equal(init_range("p", start, numel), expected)
            assert sum(asked) == expected.count_nonzero()


def test_what_is_not_cut_is_on_every_rank() -> None:
    cut = Cut({"cut": places((4, 2), 0, 2)[1], "whole": Place(torch.Size((4, 2)))}, size=2)
    assert (cut.copies("cut"), cut.copies("whole")) == (1, 2)


def partial_sums(groups: Groups) -> dict[str, Any]:
    """Gradients that differ by rank, of a parameter on all ranks and of one that is cut; twice, by either way."""
    rank = float(groups.ranks.rank)
    where = {"whole": Place(torch.Size((2,))), "cut": places((4,), 0, 2)[groups.ranks.rank]}
    found: dict[str, Any] = {}
    for sliced in (True, False):
        cut = Cut(where, 2, groups.tp, sequence_parallel=sliced)
        together = {name: torch.full((2,), 1 + rank) for name in where}
        cut.sum_partial(together)
        weights = {name: torch.zeros(2, requires_grad=True) for name in where}
        cut.sum_partial_in_backward(weights)
        sum(((1 + rank) * weight).sum() for weight in weights.values()).backward()  # type: ignore[union-attr]
        found[f"sliced {sliced}"] = {
            name: (together[name].tolist(), weights[name].grad.tolist())  # type: ignore[union-attr]
            for name in where
        }
    found["joined"] = cut.joined("cut", torch.full((2,), rank)).tolist()
    return found


def test_partial_gradients_are_summed_where_they_are_partial() -> None:
    for rank, found in enumerate(run_ranks(partial_sums, 2, tp_size=2)):
        own, both = [1.0 + rank] * 2, [3.0, 3.0]
        assert found["sliced True"] == {"whole": (both, both), "cut": (own, own)}
        assert found["sliced False"] == {"whole": (own, own), "cut": (own, own)}
        assert found["joined"] == [0.0, 0.0, 1.0, 1.0]
