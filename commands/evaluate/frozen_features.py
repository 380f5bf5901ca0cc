"""A linear probe on frozen features, and the choice of its training samples."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy


def few_shot(label: Tensor, shots: int | None, seed: int) -> Tensor:
    """Return the positions of the training samples, long: all, or a number of each class at random.

    Args:
        label: Labels, long [N].
        shots: Samples of each class; None for all. A class with fewer gives all it has.
        seed: Of the choice.
    """
    if shots is None:
        return torch.arange(len(label))
    order = torch.randperm(len(label), generator=torch.Generator().manual_seed(seed))
    chosen = [order[label[order] == number][:shots] for number in label.unique().tolist()]
    return torch.cat(chosen).sort().values


def linear_probe(features: Tensor, label: Tensor, classes: int, c: float = 1.0) -> tuple[Tensor, Tensor]:
    """Fit multinomial logistic regression by L-BFGS; the optimum is that of scikit-learn's LogisticRegression.

    It minimizes |W|^2 / 2 + c * (sum of the cross entropies); the bias is not penalized.

    Args:
        features: [N, E].
        label: long [N].
        classes: Number of classes C.
        c: Inverse of the penalty's weight.

    Returns:
        Weight [C, E] and bias [C], float64.
    """
    features = features.double()
    weight = torch.zeros(classes, features.shape[1], dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(classes, dtype=torch.float64, requires_grad=True)
    options = {"max_iter": 1000, "tolerance_grad": 1e-7, "tolerance_change": 1e-12, "history_size": 20}
    optimizer = torch.optim.LBFGS([weight, bias], line_search_fn="strong_wolfe", **options)  # type: ignore[arg-type]

    def closure() -> Tensor:
        optimizer.zero_grad()
        data = cross_entropy(features @ weight.T + bias, label, reduction="sum")
        # Divided by the number of samples, so that the tolerances do not depend on it.
        loss = (data + weight.square().sum() / (2 * c)) / len(label)
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
    return weight.detach(), bias.detach()
