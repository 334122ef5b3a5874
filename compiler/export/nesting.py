"""The stages of a plan as one graph: each stage is inside the stage before it.

Stage 0 is the main graph. After a stage's exit, the indices of the samples that do not leave are
computed (``NonZero``). If there are such samples, an ``If`` runs the rest of the model on these
rows of the batch (``Gather``) and replaces their answers (``ScatterND``). The weights of a stage
are stored in the branch of the ``If`` that uses them: ONNX Runtime folds and prepacks a branch's
own constants, but not constants that a branch takes from outside.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from offramp.bundle import Manifest
from offramp.certify.decision import MODEL_END
from offramp.compiler.graphs.graph import copied, default_opset, rename_graph
from offramp.compiler.graphs.shapes import BATCH
from offramp.engine.graphs.blocked_layout import enter_blocked
from offramp.engine.stages.plan import Plan, StageSpec

_ANSWER, _CONFIDENCE, _EXIT = "answer", "confidence", "exit"


def nest(plan: Plan, source: onnx.ModelProto, names: Names, *, with_exits: bool) -> onnx.ModelProto:
    """Make one model of the stages of a plan in ``leave`` mode with at least one exit.

    The model has the source model's inputs, answer, opset and IR version; ``with_exits`` adds
    outputs for exit index and confidence. Weights are in a separate file if those of the bundle's
    graphs are.
    """
    stages = [onnx.load_model_from_string(stage_graph(stage)) for stage in plan.stages]
    graph = _Nesting(plan.stages, stages, source.graph, names, with_exits=with_exits).graph()
    functions = {(f.domain, f.name): f for stage in stages for f in stage.functions}
    opsets = {o.domain: o for stage in stages for o in stage.opset_import}
    return helper.make_model(
        graph,
        ir_version=max(stage.ir_version for stage in stages),
        opset_imports=list(opsets.values()),
        functions=list(functions.values()),
    )


def stage_graph(stage: StageSpec) -> bytes:
    """Return a stage's graph as the engine runs it; more operators then keep blocked layouts."""
    return enter_blocked(stage.load_light().model)


@dataclass(slots=True)
class _Level:
    """Graph of the rows of the batch that reach a stage, while the graph is built."""

    prefix: str
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: list[onnx.TensorProto] = field(default_factory=list)
    sparse_weights: list[onnx.SparseTensorProto] = field(default_factory=list)
    described: list[onnx.ValueInfoProto] = field(default_factory=list)

    def own(self, name: str) -> str:
        """Return the name, at this level, of a tensor that exporting adds."""
        return f"{self.prefix}:{name}"

    def inner(self, name: str) -> str:
        """Return the name of a tensor of the stage's own graph, which no added tensor has."""
        return f"{self.prefix}/{name}"

    def add(
        self, op: str, inputs: Sequence[str], name: str, output: str = "", **attributes: Any
    ) -> str:
        output = output or self.own(name)
        node = helper.make_node(op, list(inputs), [output], name=self.own(name), **attributes)
        self.nodes.append(node)
        return output

    def weight(self, name: str, value: NDArray[Any]) -> str:
        self.weights.append(numpy_helper.from_array(value, self.own(name)))
        return self.own(name)

    def graph(
        self, inputs: Sequence[onnx.ValueInfoProto], outputs: Sequence[onnx.ValueInfoProto]
    ) -> onnx.GraphProto:
        return helper.make_graph(
            self.nodes,
            self.prefix,
            inputs,
            outputs,
            initializer=self.weights,
            value_info=self.described,
            sparse_initializer=self.sparse_weights,
        )


class _Nesting:
    """Builds the main graph, and inside it the graph of each later stage."""

    def __init__(
        self,
        specs: Sequence[StageSpec],
        stages: Sequence[onnx.ModelProto],
        source: onnx.GraphProto,
        names: Names,
        *,
        with_exits: bool,
    ) -> None:
        self._specs = specs
        self._stages = stages
        self._source = source
        self._names = names
        self._inputs = {info.name for info in source.input}
        self._given = (_ANSWER, _EXIT, _CONFIDENCE) if with_exits else (_ANSWER,)
        (self._answer,) = (info for info in source.output if info.name == specs[-1].answer)
        self._types = {info.name: info for info in source.input}
        for stage in stages:
            self._types |= {i.name: i for i in (*stage.graph.input, *stage.graph.output)}
        self._opset = default_opset(stages[0])

    def graph(self) -> onnx.GraphProto:
        level = self._level(0)
        # A weight that is also listed as an input is a default that a caller may override.
        defaults = [np.array(s.threshold, np.float32) for s in self._specs if not s.final]
        level.weights += map(numpy_helper.from_array, defaults, self._names.thresholds)
        names = self._names.thresholds
        optional = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ()) for name in names]
        graph = level.graph([*self._source.input, *optional], self._outputs(0, self._results(0)))
        graph.name = self._source.name
        return graph

    def _level(self, index: int) -> _Level:
        """Build the graph of the rows that reach a stage, including all later stages."""
        spec = self._specs[index]
        level = _Level(prefix=f"{self._names.inner}{index}")
        if index:
            self._gather(level, index)
        self._inline(level, index)
        if spec.final:
            self._finish(level, spec)
        else:
            self._add_exit_decision(level, index)
        return level

    def _gather(self, level: _Level, index: int) -> None:
        """Add a Gather of the remaining rows for each tensor that this or a later stage reads."""
        outer = index - 1
        rows = _Level(prefix=f"{self._names.inner}{outer}").own("rows")
        for name in self._specs[outer].carried:
            taken = self._name(index, name)
            level.add("Gather", [self._name(outer, name), rows], f"stay/{name}", taken, axis=0)
            # The type is stated, as ONNX Runtime blocks layouts only if it knows the channels.
            info = copied(self._types[name])
            info.name = taken
            level.described.append(info)

    def _inline(self, level: _Level, index: int) -> None:
        """Add the stage's operators and weights, with a symbol for the number of its rows."""
        graph = self._stages[index].graph
        rename_graph(graph, lambda name: self._name(index, name))
        level.nodes += graph.node
        level.weights += graph.initializer
        level.sparse_weights += graph.sparse_initializer
        level.described += graph.value_info
        level.described += (o for o in graph.output if o.name != self._answer.name)
        rename_symbol(level.described, BATCH, self._rows(index))

    def _add_exit_decision(self, level: _Level, index: int) -> None:
        """Add the exit's decision, and an ``If`` that contains the rest of the model."""
        spec = self._specs[index]
        assert spec.answer is not None
        assert spec.confidence is not None
        confidence = self._name(index, spec.confidence)
        here = {_ANSWER: self._name(index, spec.answer), _CONFIDENCE: confidence}
        if _EXIT in self._given:
            here[_EXIT] = _filled(level, confidence, spec.exit)
        # "Not leaves", because "confidence < threshold" is false for NaN, but such a sample must
        # stay.
        leaves = level.add("GreaterOrEqual", [confidence, self._names.thresholds[index]], "leaves")
        stays = level.add("NonZero", [level.add("Not", [leaves], "stays")], "stays_by_axis")
        rows = level.add("Reshape", [stays, level.weight("flat", np.array([-1], np.int64))], "rows")
        number = level.add("Size", [rows], "number")
        some = level.add("Greater", [number, level.weight("none", np.array(0, np.int64))], "some")
        node = helper.make_node(
            "If",
            [some],
            list(self._results(index).values()),
            name=level.own("if"),
            then_branch=self._go_on(index, here, rows),
            else_branch=self._leave(index, here),
        )
        level.nodes.append(node)

    def _go_on(self, index: int, here: dict[str, str], rows: str) -> onnx.GraphProto:
        """Run the later stages on the remaining rows, and put the results in these rows."""
        level = self._level(index + 1)
        column = level.weight("column", np.array([-1, 1], np.int64))
        places = level.add("Reshape", [rows, column], "places")
        merged = {
            kind: level.add("ScatterND", [here[kind], places, deeper], f"merged/{kind}")
            for kind, deeper in self._results(index + 1).items()
        }
        return level.graph([], self._outputs(index, merged))

    def _leave(self, index: int, here: dict[str, str]) -> onnx.GraphProto:
        level = _Level(prefix=f"{self._names.inner}{index}:leave")
        kept = {kind: level.add("Identity", [here[kind]], kind) for kind in self._given}
        return level.graph([], self._outputs(index, kept))

    def _finish(self, level: _Level, spec: StageSpec) -> None:
        """Add exit index and confidence of the model's own answer, as ``confidence_of`` does."""
        if _EXIT not in self._given:
            return
        results = self._results(spec.index)
        shares = level.add("Cast", [results[_ANSWER]], "as_float", to=TensorProto.FLOAT)
        if spec.form in ("logits", "log-probabilities"):
            shares = level.add("Softmax", [shares], "probabilities", axis=-1)
        largest = self._row_max(level, shares, "largest")
        if spec.form == "values":  # on the model's own scale: as in ``confidence_of``
            largest = level.add("Max", [largest, level.weight("least", _scalar(1))], "sure")
        at_most_one = level.add("Min", [largest, level.weight("one", _scalar(1))], "at_most_one")
        # Runtimes differ in the maximum of values with NaN, so NaN is detected separately.
        nan = level.add("Cast", [level.add("IsNaN", [shares], "nan")], "nans", to=TensorProto.FLOAT)
        zero = level.weight("zero", _scalar(0))
        valid = level.add("Equal", [self._row_max(level, nan, "any_nan"), zero], "valid")
        level.add("Where", [valid, at_most_one, zero], "confidence", results[_CONFIDENCE])
        _filled(level, largest, MODEL_END, results[_EXIT])

    def _row_max(self, level: _Level, tensor: str, name: str) -> str:
        """Add the largest value of each row; axes are an input or an attribute, by the opset."""
        if self._opset >= 18:
            axes = level.weight(f"axes/{name}", np.array([1], np.int64))
            return level.add("ReduceMax", [tensor, axes], name, keepdims=0)
        return level.add("ReduceMax", [tensor], name, axes=[1], keepdims=0)

    def _name(self, index: int, name: str) -> str:
        """Return the name of a stage's tensor in the file; in stage 0 inputs keep their names."""
        level = _Level(prefix=f"{self._names.inner}{index}")
        return name if not index and name in self._inputs else level.inner(name)

    def _results(self, index: int) -> dict[str, str]:
        """Return the names of the results of a stage and all later ones, for each of its rows."""
        level = _Level(prefix=f"{self._names.inner}{index}")
        shown = {_CONFIDENCE: self._names.confidence, _EXIT: self._names.exit}
        every = {_ANSWER: self._answer.name, **shown}
        if index:
            every = {kind: level.own(kind) for kind in every}
            if self._specs[index].final:
                every[_ANSWER] = level.inner(self._answer.name)
        return {kind: every[kind] for kind in self._given}

    def _outputs(self, index: int, names: Mapping[str, str]) -> list[onnx.ValueInfoProto]:
        rows, infos = self._rows(index), []
        for kind, name in names.items():
            element = TensorProto.INT32 if kind == _EXIT else TensorProto.FLOAT
            info = helper.make_tensor_value_info(name, element, [rows])
            if kind == _ANSWER:
                info = copied(self._answer)
                info.name = name
                rename_symbol([info], BATCH, rows)
            infos.append(info)
        return infos

    def _rows(self, index: int) -> str:
        """Return the symbol for the number of rows in a stage; each stage has another symbol."""
        return f"{self._names.inner}rows_{index}" if index else BATCH


def _filled(level: _Level, like: str, value: int | None, output: str = "") -> str:
    shape = level.add("Shape", [like], "rows_here")
    filling = numpy_helper.from_array(np.array([value], np.int32))
    return level.add("ConstantOfShape", [shape], "exit_here", output, value=filling)


def _scalar(value: float) -> NDArray[np.float32]:
    return np.array(value, np.float32)


def rename_symbol(infos: Iterable[onnx.ValueInfoProto], old: str, new: str) -> None:
    """Rename a symbolic size in the shapes of tensors, also in products with other sizes."""
    token = re.compile(rf"(?<!\w){re.escape(old)}(?!\w)")
    for info in infos:
        for dim in info.type.tensor_type.shape.dim:
            if dim.HasField("dim_param"):
                dim.dim_param = token.sub(lambda _: new, dim.dim_param)


EXIT, CONFIDENCE = "exit", "confidence"
"""Names of the outputs of ``--with-exits``."""
METADATA = "offramp."
"""Prefix of the keys of an exported file's metadata."""
_OURS = "offramp_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Names that exporting adds to the names in the model, all different from these."""

    exit: str
    """Output, int32 [batch]: index of the exit that answered, -1 for the model's end."""
    confidence: str
    """Output, float32 [batch]: confidence of the answer."""
    thresholds: tuple[str, ...]
    """Optional inputs, float32 scalars: the exits' thresholds, in depth order."""
    inner: str
    """Prefix of all other added names."""

    @classmethod
    def of(cls, manifest: Manifest, plan: Plan) -> Names:
        """Choose names that no input or output of the model has.

        The outputs are called ``exit`` and ``confidence``. If the model has an input or output with
        one of these names, both names get the prefix ``offramp_``, which is repeated if that name
        exists as well.
        """
        taken = {tensor.name for tensor in (*manifest.declared, *manifest.outputs)}
        shown = _free((EXIT, CONFIDENCE), taken)
        thresholds = _free([f"{_OURS}threshold_{index}" for index in plan.exits], taken)
        inner = _OURS
        while any(name.startswith(inner) for name in (*taken, *shown, *thresholds)):
            inner = f"{inner}_"
        return cls(exit=shown[0], confidence=shown[1], thresholds=tuple(thresholds), inner=inner)


def _free(wanted: Iterable[str], taken: set[str]) -> list[str]:
    names = list(wanted)
    while not taken.isdisjoint(names):
        names = [f"{_OURS}{name}" for name in names]
    return names
