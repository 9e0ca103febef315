"""The reference of topk_softmax."""

from torch_ops.declarations.topk_softmax import topk_softmax as _declaration

topk_softmax = _declaration.reference
