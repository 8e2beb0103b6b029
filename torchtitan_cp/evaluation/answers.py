"""Which tokens of an answer a model gets wrong; logits of other tokens are not made."""

import torch
import torch.distributed as dist
from torch import Tensor


@torch.no_grad()
def wrong_answers(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, ignored: int, group: dist.ProcessGroup | None, first: int
) -> Tensor:
    """How many labels of each row are not the most likely token, given all true tokens before it.

    Args:
        hidden: `[B, S/cp, E]`; with `group`, the same on all its ranks, as `labels` is.
        weight: of the output `[V, E]`; with `group`, this rank's rows, of any number, none too.
        labels: `[B, S/cp]` int64, `ignored` where nothing is asked.
        group: the ranks that hold all rows between them; None where all are here.
        first: vocabulary index of the first row held here.

    Returns:
        `[B]` int64, of the tokens here: a prompt that is dealt to several ranks is right if all of them count none.
    """
    rows, columns = (labels != ignored).nonzero(as_tuple=True)
    logits = (hidden[rows, columns] @ weight.t()).float()
    best = torch.full((len(rows),), -torch.inf, dtype=torch.float64, device=hidden.device)
    token = torch.zeros_like(best)
    if len(weight):
        best, token = (x.double() for x in logits.max(-1))
    if group:
        held = torch.stack([best, token + first])
        gathered = held.new_empty(dist.get_world_size(group), *held.shape)
        dist.all_gather(list(gathered), held, group=group)
        token = gathered[:, 1].gather(0, gathered[:, 0].argmax(0, keepdim=True)).squeeze(0)
    wrong = token != labels[rows, columns]
    return labels.new_zeros(len(labels)).index_add_(0, rows, wrong.long())
