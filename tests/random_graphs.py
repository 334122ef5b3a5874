"""Random graphs with skips, branches, inputs that are read again, and batches that are turned."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import onnx

from tests.models import Builder

TOKENS, WIDTH = 4, 32
_REACH = 3
"""Number of earlier operators that an operator may read."""


@dataclass(frozen=True, kw_only=True)
class Value:
    """A tensor, [batch, tokens, width] or [tokens, batch, width]."""

    name: str
    turned: bool = False


class RandomGraph:
    """Draws a classifier of some blocks, each of which does work; the last tensors are joined."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._b = Builder(seed=seed % 1000)
        self._inputs = [Value(name=self._input(i)) for i in range(self._random.randint(1, 2))]
        self._made: list[Value] = []

    def model(self) -> onnx.ModelProto:
        """Return the classifier."""
        self._made.append(self._work(self._inputs[0]))
        for _ in range(self._random.randint(3, 8)):
            steps = [self._work, self._bend, self._turn, self._joined, self._read_again]
            (step,) = self._random.choices(steps, weights=[5, 2, 2, 3, 4])
            self._made.append(step(self._recent()))
        every = self._made[-1]
        for other in self._made[-self._random.randint(1, 2) : -1]:
            every = self._add(every, other)
        pooled = self._b.node("ReduceMean", every.name, axes=[0 if every.turned else 1], keepdims=0)
        self._b.linear(pooled, WIDTH, 3, out="logits")
        self._b.output("logits", ["batch", 3])
        return self._b.build()

    def _input(self, index: int) -> str:
        return self._b.input(f"in{index}", ["batch", TOKENS, WIDTH])

    def _recent(self) -> Value:
        """Mostly the last tensor, so that there are places where all passes through one."""
        reach = 1 if self._random.random() < 0.7 else _REACH
        return self._random.choice(self._made[-reach:])

    def _work(self, x: Value) -> Value:
        product = self._b.matmul(x.name, WIDTH, WIDTH)
        return Value(name=self._b.node("Relu", product), turned=x.turned)

    def _bend(self, x: Value) -> Value:
        return Value(name=self._b.node("Tanh", x.name), turned=x.turned)

    def _turn(self, x: Value) -> Value:
        turned = self._b.node("Transpose", x.name, perm=[1, 0, 2])
        return self._work(Value(name=turned, turned=not x.turned))

    def _joined(self, x: Value) -> Value:
        return self._add(self._work(x), self._recent())

    def _read_again(self, x: Value) -> Value:
        """Scale by something cheap that is made of a graph input."""
        source = self._random.choice(self._inputs)
        low = self._b.node("Less", source.name, self._b.constant(0.0, np.float32))
        one, half = self._b.constant(1.0, np.float32), self._b.constant(0.5, np.float32)
        scale = Value(name=self._b.node("Where", low, one, half))
        if scale.turned != x.turned:
            name = self._b.node("Transpose", scale.name, perm=[1, 0, 2])
            scale = Value(name=name, turned=x.turned)
        return Value(name=self._b.node("Mul", x.name, scale.name), turned=x.turned)

    def _add(self, x: Value, other: Value) -> Value:
        name = other.name
        if other.turned != x.turned:
            name = self._b.node("Transpose", name, perm=[1, 0, 2])
        return Value(name=self._b.node("Add", x.name, name), turned=x.turned)
