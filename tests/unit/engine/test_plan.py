"""Which tensors stages read, answer with, and carry on."""

from __future__ import annotations

from offramp.bundle import ActiveExit, Answer, Exit, Head, Segment, TensorSpec
from offramp.engine.plan import plan_stages


def segment(index: int, *inputs: str, output: str) -> Segment:
    return Segment(index=index, file=f"{index}", inputs=inputs, output=output, flops_share=1 / 3)


def exit_after(index: int, *inputs: str) -> Exit:
    return Exit(
        index=index,
        after_segment=index,
        file=f"exit{index}",
        inputs=inputs,
        output=f"answer{index}",
        confidence=f"confidence{index}",
        head=Head(kind="mean"),
        agreement=0.9,
    )


class Parts:
    """Of a model whose mask only its exits read, and whose scale only its last segment does."""

    inputs = tuple(
        TensorSpec(name=name, dtype="float32", shape=("batch", 4))
        for name in ("x", "mask", "scale")
    )
    answer = Answer(output="logits", classes=3, form="logits")
    segments = (
        segment(0, "x", output="cut0"),
        segment(1, "cut0", output="cut1"),
        segment(2, "cut1", "scale", output="logits"),
    )
    exits = (exit_after(0, "cut0", "mask"), exit_after(1, "cut1", "mask"))


def test_what_only_later_exits_read_is_carried_to_them() -> None:
    active = [ActiveExit(exit=0, threshold=0.9), ActiveExit(exit=1, threshold=0.8)]
    first, second, last = plan_stages(Parts(), lambda _: b"", active)
    assert (first.inputs, first.carried) == (("x", "mask"), ("cut0", "scale", "mask"))
    assert (second.inputs, second.carried) == (("cut0", "mask"), ("cut1", "scale"))
    assert (last.inputs, last.carried) == (("cut1", "scale"), ())
    assert [stage.answer for stage in (first, second, last)] == ["answer0", "answer1", "logits"]
