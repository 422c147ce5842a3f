# SPDX-License-Identifier: Apache-2.0
"""Data that learners exchange in an update: one tensor each; all get the sum.

It holds the gradients, a flag for each parameter that has one, and a table with a row for each
learner. A learner fills its own row and leaves the others at zero, so the sum has all rows.
"""

import torch

from beast.errors import FlagError

# Columns of the table before the metrics: whether the learner has a batch, whether its gradient is
# not finite, whether it asks to stop; number and sum of returns, of episodes and then of games.
HEADER_SIZE = 7


class Exchange:
    """Packs a learner's gradients and metrics into a tensor; unpacks the sum of all tensors.

    Attributes:
      layout: how many numbers each metric has, by name; None until it is known.
      num_batches: how many learners had a batch in the last sum; None before the first sum.
      not_finite: rows of the learners whose gradients or metrics were not finite.
      has_to_stop: whether a learner asked to stop.
    """

    def __init__(self):
        self.layout = None
        self.num_batches, self.not_finite, self.has_to_stop = None, [], False
        self._returns = [], []  # of episodes and of games, not yet sent to the others
        self._shared_returns = [], []  # the same, received from all learners
        self._has_unpacked = False  # since share_returns was last called

    def check_is_first(self):
        """Raise a ValueError if this update was summed already: a second sum has other metrics."""
        if self._has_unpacked and self.num_batches:
            raise ValueError(
                "learn calls group.sum twice in an update: call it once, after all backward passes"
            )

    def remember_buffers(self, model):
        """Remember the net's buffers, which no forward pass may change from here on."""
        self._buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def _check_buffers(self, model):
        def is_same(x, y):
            return torch.isclose(x, y, rtol=0, atol=0, equal_nan=True).all()

        for name, buffer in model.named_buffers():
            before = self._buffers.get(name)  # None: the forward pass has added it
            if before is None or buffer.shape != before.shape or not is_same(buffer, before):
                raise FlagError(
                    f"the net's buffer {name!r} changes while it learns, and would then differ "
                    "between learners: use a layer without such statistics (GroupNorm or "
                    "LayerNorm for BatchNorm), or one learner"
                )

    @staticmethod
    def layout_of(metrics):
        return {name: torch.as_tensor(value).numel() for name, value in metrics.items()}

    def pack(self, model, metrics, row, num_rows, asks_to_stop=False):
        """Return a tensor to sum: float64 if a parameter is float64, else float32.

        Args:
          model: its gradients are packed.
          metrics: tensors and numbers by name; empty if the learner has no batch.
          row: of this learner in the table.
          num_rows: of the table, one for each learner.

        Raises:
          FlagError: a buffer of the net has changed.
          ValueError: metrics have other names or sizes than before.
        """
        self._check_buffers(model)
        parameters = list(model.parameters())
        is_double = any(p.dtype == torch.float64 for p in parameters)
        dtype, device = torch.float64 if is_double else torch.float32, parameters[0].device
        gradients = torch.cat(
            [
                (torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1).to(dtype)
                for p in parameters
            ]
        )
        numbers = [bool(metrics), False, asks_to_stop]
        for returns in self._returns:
            numbers += [len(returns), sum(returns)]
        row_size = HEADER_SIZE + sum(self.layout.values())
        own = torch.tensor(numbers + [0] * (row_size - HEADER_SIZE), dtype=dtype, device=device)
        own[1] = ~gradients.isfinite().all()
        if metrics:
            values = {n: torch.as_tensor(v, device=device).flatten() for n, v in metrics.items()}
            if {name: value.numel() for name, value in values.items()} != self.layout:
                raise ValueError(
                    f"metrics have to be the same in each update, {list(self.layout)}, but are "
                    f"{list(metrics)}"
                )
            own[HEADER_SIZE:] = torch.cat([values[name].to(dtype) for name in self.layout])
        there = torch.tensor([p.grad is not None for p in parameters], dtype=dtype, device=device)
        table = torch.zeros(num_rows, row_size, dtype=dtype, device=device)
        table[row] = own
        return torch.cat([gradients, there, table.flatten()])

    def unpack(self, model, total, num_rows):
        """Write summed gradients into the model, store the rest here, and return the metrics.

        Of the metrics, `moments` is not summed but gathered: [rows, moments]. There are none where
        no learner has a batch. Returns that were packed count as sent.
        """
        parameters = list(model.parameters())
        sizes = [p.numel() for p in parameters]
        gradients, rest = total.split([sum(sizes), len(total) - sum(sizes)])
        there, table = rest.double().cpu().split([len(sizes), len(rest) - len(sizes)])
        parts = zip(parameters, gradients.split(sizes), there.tolist(), strict=True)
        for parameter, part, has_gradient in parts:
            if not has_gradient:
                parameter.grad = None
                continue
            if parameter.grad is None:
                # With the parameter's strides, as after backward(): a norm adds in their order.
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(part.view(parameter.shape))
        for returns in self._returns:
            returns.clear()
        return self._read_table(table.view(num_rows, -1))

    def _read_table(self, table):
        self._has_unpacked = True
        self.num_batches = int(table[:, 0].sum())
        self.not_finite = [i for i, row in enumerate(table) if row[1] or not row.isfinite().all()]
        self.has_to_stop = bool(table[:, 2].any())
        for returns, begin in zip(self._shared_returns, (3, 5), strict=True):
            for count, total in table[:, begin : begin + 2].tolist():
                returns += [total / count] * int(count) if count else []
        if not self.num_batches:
            return {}
        parts = table[:, HEADER_SIZE:].split(list(self.layout.values()), dim=1)
        return {
            name: part if name == "moments" else part.sum()
            for name, part in zip(self.layout, parts, strict=True)
        }

    def forget_returns(self):
        """Forget the returns that were not yet sent, and those that were received."""
        for returns in (*self._returns, *self._shared_returns):
            returns.clear()

    def add_returns(self, *returns):
        """Send returns of episodes and of games, two lists, with the next exchange."""
        for pending, new in zip(self._returns, returns, strict=True):
            pending += new

    def share_returns(self, *returns):
        """Exchange returns of episodes and of games that have ended, two lists.

        The given ones are sent with the next exchange. Those received from all learners since the
        last call are returned. A learner's returns arrive as their number and sum, so each is
        replaced by their mean.

        Raises:
          FlagError: there was no sum since the last call.
        """
        if not self._has_unpacked:
            raise FlagError(
                "there are several learners, but this program's `learn` does not sum over them: "
                "change it as docs/learners.md shows, or start only one"
            )
        self._has_unpacked = False
        self.add_returns(*returns)
        shared, self._shared_returns = self._shared_returns, ([], [])
        return shared


def describe_net(model):
    """Return the dtypes, shapes and order of weights, which all learners must have in common."""
    tensors = model.state_dict() | dict(model.named_buffers())  # also those that are not saved
    return {n: f"{t.dtype} {list(t.shape)}" for n, t in tensors.items()} | {"order": list(tensors)}


def refuse_difference(what, *learners):
    """Raise a FlagError if two learners differ.

    Args:
      what: name of what is compared.
      learners: for each of the two, a text that names it, and its value, a text or a dict.
    """
    (first, a), (second, b) = learners
    if a == b:
        return
    if isinstance(a, dict) and isinstance(b, dict):
        names = [name for name in a | b if a.get(name) != b.get(name)]
        a, b = ({name: x.get(name) for name in names} for x in (a, b))
    raise FlagError(f"all learners need the same {what}: {first} has {a}, {second} {b}")
