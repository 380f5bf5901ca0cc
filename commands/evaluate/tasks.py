"""The 38 sets of DataComp's average, those beside it, and the aggregates.

Keys, folders, main metrics and sizes are those of the public DataComp code (Gadre et al., 2023, arXiv 2304.14108).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ...common.errors import UserError
from ...common.names import did_you_mean

Protocol = Literal["zero_shot", "linear_probe", "knn"]
PROTOCOLS: tuple[Protocol, ...] = ("zero_shot", "linear_probe", "knn")
Kind = Literal["classification", "attributes", "retrieval", "winogavil", "negatives"]


@dataclass(frozen=True)
class Task:
    """One set.

    Attributes:
        key: Key in DataComp's result files.
        size: Number of test samples; None if it differs by version.
        main: Name of the main metric among the set's metrics.
        kind: How the set is evaluated.
        group: Column of the `.npy` metadata with the group of a sample, where the main metric is that of the worst.
        left_out: Groups that the worst is not searched among.
    """

    key: str
    name: str
    size: int | None
    main: str = "acc1"
    kind: Kind = "classification"
    folder: str = ""
    group: int | None = None
    left_out: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.folder:
            object.__setattr__(self, "folder", f"wds_{self.key.replace('/', '-')}_test")

    @property
    def hub_name(self) -> str:
        """The data set's name on the Hugging Face hub."""
        return f"{'djghosh' if self.folder.startswith('wds_') else 'nlphuji'}/{self.folder}"


_RECALL = "mean_per_class_recall"
_FLICKR = "flickr_1k_test_image_text_retrieval"
_COCO = "mscoco_2014_5k_test_image_text_retrieval"

DATACOMP = (
    Task("imagenet1k", "ImageNet 1k", 50_000),
    Task("imagenet_sketch", "ImageNet Sketch", 50_889),
    Task("imagenetv2", "ImageNet v2", 10_000),
    Task("imagenet-a", "ImageNet-A", 7_500),
    Task("imagenet-o", "ImageNet-O", 2_000),
    Task("imagenet-r", "ImageNet-R", 30_000),
    Task("objectnet", "ObjectNet", 18_574),
    Task("vtab/caltech101", "Caltech-101", 6_085, _RECALL),
    Task("vtab/cifar100", "CIFAR-100", 10_000),
    Task("vtab/clevr_count_all", "CLEVR Counts", 15_000),
    Task("vtab/clevr_closest_object_distance", "CLEVR Distance", 15_000),
    Task("vtab/dtd", "Describable Textures", 1_880),
    Task("vtab/eurosat", "EuroSAT", 5_400),
    Task("vtab/kitti_closest_vehicle_distance", "KITTI Vehicle Distance", 711),
    Task("vtab/flowers", "Oxford Flowers-102", 6_149, _RECALL),
    Task("vtab/pets", "Oxford-IIIT Pet", 3_669, _RECALL),
    Task("vtab/pcam", "PatchCamelyon", 32_768),
    Task("vtab/resisc45", "RESISC45", 6_300),
    Task("vtab/svhn", "SVHN", 26_032),
    Task("sun397", "SUN397", 108_754),
    Task("cifar10", "CIFAR-10", 10_000),
    Task("country211", "Country211", 21_100),
    Task("fgvc_aircraft", "FGVC Aircraft", 3_333, _RECALL),
    Task("food101", "Food-101", 25_250),
    Task("gtsrb", "GTSRB", 12_630),
    Task("mnist", "MNIST", 10_000),
    Task("voc2007", "Pascal VOC 2007", 14_976),
    Task("renderedsst2", "Rendered SST2", 1_821),
    Task("cars", "Stanford Cars", 8_041),
    Task("stl10", "STL-10", 8_000),
    Task("wilds/iwildcam", "iWildCam", 42_791, "F1-macro_all"),
    Task("wilds/camelyon17", "Camelyon17", 85_054),
    Task("wilds/fmow", "FMoW", 22_108, "acc_worst_region", group=0, left_out=(5,)),  # 5: "Other"
    Task("fairness/dollar_street", "Dollar Street", 3_503, "acc_top5_wg", folder="wds_dollar_street_test", group=0),
    Task("fairness/geode", "GeoDE", 12_488, "acc_wg", folder="wds_geode_test", group=0),
    Task(f"retrieval/{_FLICKR}", "Flickr", 1_000, "mean_recall@1", "retrieval", _FLICKR),
    Task(f"retrieval/{_COCO}", "MSCOCO", 5_000, "mean_recall@1", "retrieval", _COCO),
    Task("misc/winogavil", "WinoGAViL", 3_563, "jaccard_score_10-12", "winogavil", "winogavil"),
)
"""The sets of the average. The metadata's columns: FMoW region, year, class; Dollar Street income group, income,
region; GeoDE region, country."""

_CREPE = ("add_att", "add_obj", "replace_att", "replace_obj", "replace_rel", "swap_att", "swap_obj")
BESIDE = (
    Task("fairness/fairface", "FairFace", 10_954, "acc_avg", "attributes"),
    Task("fairness/utkface", "UTKFace", 23_703, "acc_avg", "attributes"),
    *(
        Task(f"sugarcrepe/{subset}", f"SugarCrepe {subset}", None, "acc1", "negatives", f"sugarcrepe_{subset}")
        for subset in _CREPE
    ),
    Task("retrieval/sharegpt4v_1k", "ShareGPT4V-1k", 1_000, "mean_recall@1", "retrieval", "sharegpt4v_1k"),
    Task("retrieval/sharegpt4v_15k", "ShareGPT4V-15k", 15_000, "mean_recall@1", "retrieval", "sharegpt4v_15k"),
    Task("retrieval/urban1k", "Urban1k", 1_000, "mean_recall@1", "retrieval", "urban1k"),
)
"""Sets that are in no aggregate."""

TASKS = {task.key: task for task in (*DATACOMP, *BESIDE)}
SUITES = {"datacomp": DATACOMP, "all": (*DATACOMP, *BESIDE)}
_SHIFTS = ("imagenet_sketch", "imagenetv2", "imagenet-a", "imagenet-o", "imagenet-r", "objectnet")
AGGREGATES = {
    "ImageNet": ("imagenet1k",),
    "shifts": _SHIFTS,
    "VTAB": (*(key for key in TASKS if key.startswith("vtab/")), "sun397"),
    "retrieval": (f"retrieval/{_FLICKR}", f"retrieval/{_COCO}", "misc/winogavil"),
    "average": tuple(task.key for task in DATACOMP),
}
"""Keys of the sets whose main metrics are averaged."""


def chosen_tasks(suite: str | None, keys: Sequence[str] = ()) -> tuple[Task, ...]:
    """Return the tasks of a suite, or those with the given keys.

    Raises:
        UserError: If there is no such suite or task, or both are given.
    """
    if keys and suite is not None:
        raise UserError("Expected --suite or --tasks, got both: leave one of them out.")
    if not keys:
        suite = suite or "datacomp"
        if suite not in SUITES:
            raise UserError(f"Expected a suite, got {suite!r}: {did_you_mean(suite, list(SUITES))}")
        return SUITES[suite]
    for key in keys:
        if key not in TASKS:
            raise UserError(f"Expected the key of a set after --tasks, got {key!r}: {did_you_mean(key, list(TASKS))}")
    return tuple(TASKS[key] for key in dict.fromkeys(keys))
