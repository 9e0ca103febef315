"""The reference of topk_softmax, compiled."""

from torch_ops.declarations.topk_softmax import topk_softmax as _declaration

from ._compiled import compiled

topk_softmax, supports = compiled(_declaration, ("logits",))
