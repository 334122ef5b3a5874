"""Tensors that stages read, answer with, and carry on."""

from __future__ import annotations

from dataclasses import replace

import onnx
from onnx import TensorProto, helper

from offramp.bundle import ActiveExit, Answer, Exit, Head, Segment, TensorSpec
from offramp.certify import MODEL_END
from offramp.engine.stages.answering_graphs import answering_graphs
from offramp.engine.stages.plan import StageSpec, chain_stages, plan_stages


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
    """Parts of a model whose mask only its exits read, and whose scale only its last segment
    reads.
    """

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


def test_stages_end_at_borders_without_an_answer() -> None:
    active = [ActiveExit(exit=0, threshold=0.9)]
    stages = plan_stages(Parts(), lambda _: b"", active, borders={0, 1, 2})
    assert [stage.unit for stage in stages] == [(0, 0, 0), (1, 1, None), (2, 2, None)]
    assert [stage.exit for stage in stages] == [0, None, MODEL_END]
    assert (stages[1].answer, stages[1].carried) == (None, ("cut1", "scale"))


class CascadeParts:
    """Two quantised segments, then the source model, which restarts from the input and a scale."""

    inputs = Parts.inputs
    answer = Parts.answer
    segments = (
        segment(0, "x", output="q/cut0"),
        segment(1, "q/cut0", "scale", output="q/logits"),
        Segment(index=2, file="source", inputs=("x", "scale"), output="logits", flops_share=1.0),
    )
    exits = (
        exit_after(0, "q/cut0", "mask"),
        replace(exit_after(1, "q/logits"), head=Head(kind="own")),
    )


def cascade_stages(*exits: int) -> tuple[StageSpec, ...]:
    active = [ActiveExit(exit=index, threshold=0.9) for index in exits]
    return plan_stages(CascadeParts(), parts_of, active)


def parts_of(file: str) -> bytes:
    """A graph of one operator for each part, by its file."""
    known = {str(s.index): s for s in CascadeParts.segments} | {"source": CascadeParts.segments[2]}
    if file in known:
        reads, writes = known[file].inputs, (known[file].output,)
    else:
        exit_ = next(e for e in CascadeParts.exits if e.file == file)
        reads, writes = exit_.inputs, (exit_.output, exit_.confidence)
    described = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in names]
        for names in (reads, writes)
    ]
    nodes = [helper.make_node("Sum", list(reads), [name], name=f"{name}:Sum") for name in writes]
    graph = helper.make_graph(nodes, file, *described)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString()


def test_the_end_of_a_cascade_is_the_source_model_alone() -> None:
    first, own, end = cascade_stages(0, 1)
    assert first.carried == ("q/cut0", "scale", "x")
    assert (own.inputs, own.carried) == (("q/cut0", "scale"), ("x", "scale"))
    assert (end.first_segment, end.last_segment, end.inputs) == (2, 2, ("x", "scale"))
    assert (end.answer, end.exit, end.carried) == ("logits", MODEL_END, ())


def test_a_border_in_the_tail_of_a_cascade_is_none() -> None:
    def spans(*active: ActiveExit) -> list[tuple[int, int, int | None]]:
        stages = plan_stages(CascadeParts(), lambda _: b"", active, borders={0, 1})
        return [stage.unit for stage in stages]

    assert spans(ActiveExit(exit=0, threshold=0.9)) == [(0, 0, 0), (2, 2, None)]
    assert spans() == [(2, 2, None)]


def test_the_quantised_tail_runs_for_nobody() -> None:
    first, end = cascade_stages(0)
    assert first.unit == (0, 0, 0)
    assert first.carried == ("x", "scale"), "not the cut tensor: nobody goes on from it"
    assert (end.unit, end.inputs) == ((2, 2, None), ("x", "scale"))
    (alone,) = cascade_stages()
    assert (alone.unit, alone.inputs) == ((2, 2, None), ("x", "scale"))


def test_a_stage_gives_its_cut_tensor_only_where_it_is_carried() -> None:
    given = [outputs_of(stage) for stage in (*cascade_stages(0, 1), *cascade_stages(0))]
    assert given == [
        ["answer0", "confidence0", "q/cut0"],
        ["answer1", "confidence1"],
        ["logits"],
        ["answer0", "confidence0"],
        ["logits"],
    ]


def outputs_of(stage: StageSpec) -> list[str]:
    return [output.name for output in onnx.load_model_from_string(stage.load()).graph.output]


def test_a_cascade_chained_is_the_source_model() -> None:
    (stage,) = chain_stages(CascadeParts(), parts_of)
    assert (stage.unit, stage.exit) == ((2, 2, None), MODEL_END)


def test_what_answers_everywhere_is_two_graphs() -> None:
    front, source = map(onnx.load_model_from_string, answering_graphs(CascadeParts(), parts_of))
    said = ["answer0", "confidence0", "answer1", "confidence1"]
    assert [output.name for output in front.graph.output] == said
    assert [output.name for output in source.graph.output] == ["logits"]
    assert {i.name for i in source.graph.input} == {"x", "scale"}
