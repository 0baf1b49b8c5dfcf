import pytest
import torch

from trainer.data.batch import Batch


def batch() -> Batch:
    return Batch({"x": torch.arange(6.0).view(3, 2), "label": torch.arange(3)}, torch.ones(3), None, 6, 2)


def test_a_batch_gives_its_fields_by_name_and_counts_samples() -> None:
    one = batch()
    assert one["x"] is one.fields["x"] and "label" in one and "y" not in one and 0 not in one
    assert len(one) == 3
    assert [*one.keys()] == ["x", "label"] and dict(**one)["label"].tolist() == [0, 1, 2]
    assert (one.num_items, one.longest) == (6, 2)
    with pytest.raises(KeyError, match=r"y.*'x', 'label'"):
        one["y"]
    with pytest.raises(TypeError):  # it would give names
        _, _ = one  # type: ignore[misc]


def test_a_compiled_function_takes_a_batch() -> None:
    def call(one: Batch) -> torch.Tensor:
        return one["x"].sum() * len(one) + one.fields["x"].sum()

    assert torch.compile(call, backend="eager", fullgraph=True)(batch()).item() == 60
