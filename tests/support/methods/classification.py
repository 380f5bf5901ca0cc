"""Reference values for tests of callbacks that classify images."""


def accuracies(ranks, labels):
    """The metrics by their definitions, from the rank of each image's class (0 the best), in percent."""
    recalls = []
    for each in sorted(set(labels)):
        own = [rank for rank, label in zip(ranks, labels, strict=True) if label == each]
        recalls.append(100 * sum(rank == 0 for rank in own) / len(own))
    return {
        "top1": 100 * sum(rank == 0 for rank in ranks) / len(ranks),
        "top5": 100 * sum(rank < 5 for rank in ranks) / len(ranks),
        "class_recall": sum(recalls) / len(recalls),
    }


def metrics_of(run, prefix, name):
    """Return the metrics of a callback by name, without prefixes."""
    start = f"{prefix}/{name}_"
    return {key.removeprefix(start): float(v) for key, v in run.callback_metrics.items() if key.startswith(start)}
