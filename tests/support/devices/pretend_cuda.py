"""A simulated GPU: tensors on "cuda" have shapes, types and a device, but no values.

Steps of a module run on it through `Trainer.fit`, backward pass included, and `questions` counts where the host would
have waited for the device. It has no kernels, and cannot run operations whose output shape depends on values.

It changes torch for good, so run it in a process of its own, and end that with `os._exit`: see `device_questions.py`.
"""

import ctypes
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from unittest.mock import patch

import torch
import torch.cuda.amp.common
from lightning import Callback, LightningDataModule
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.loops import evaluation_loop
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader
from torchmetrics import Metric

import vlightning.callbacks as package
from support.methods.tiny_modules import trainer
from vlightning.callbacks.stopping import act_last

ROOT = Path(package.__file__).parents[1]
_HAS_CONTEXT = 4  # place of `hasPrimaryContext` among the virtual functions of torch's CUDAHooksInterface
_FUNCTIONS = 120  # more than there are
_kept: list[object] = []  # by C++, which does not count references
_SIZED = ("nonzero", "masked_select", "_unique2", "unique_dim", "bincount", "multinomial")
"""Operations for whose result or check the host waits."""
_ASKING = {"_local_scalar_dense", "equal", "_to_copy", *_SIZED}


def _answer_that_no_gpu_is_in_use() -> None:
    """Replace a function of torch that the backward pass calls, and that raises without a GPU."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    find = library._ZN2at6detail12getCUDAHooksEv  # at::detail::getCUDAHooks()
    find.restype = ctypes.c_void_p
    place = ctypes.cast(find(), ctypes.POINTER(ctypes.c_void_p))  # starts with the address of its functions
    head, width = 2, ctypes.sizeof(ctypes.c_void_p)  # two entries stand before the first function
    old = ctypes.cast(place[0] - head * width, ctypes.POINTER(ctypes.c_void_p))
    table = (ctypes.c_void_p * (_FUNCTIONS + head))(*old[: _FUNCTIONS + head])
    no = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_int8)(lambda hooks, index: False)
    table[head + _HAS_CONTEXT] = ctypes.cast(no, ctypes.c_void_p).value
    _kept.extend((no, table))
    place[0] = ctypes.addressof(table) + head * width


@contextmanager
def pretended_cuda() -> Iterator[FakeTensorMode]:
    """Operations on "cuda" tensors work out shapes alone, under autocast too."""
    if not _kept:
        _answer_that_no_gpu_is_in_use()
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.cuda.is_bf16_supported = lambda *_, **__: True
    evaluation_loop.has_len_all_ranks = lambda *_, **__: True  # it makes a tensor on the device from a number
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


class Questions(TorchDispatchMode):
    """Counts the waits of the host, by kind and by calling function of this package; `on` starts it.

    "answer" is a number that was copied before, so that the host waits for the work of that time alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.on = False
        self.found: Counter[str] = Counter()

    def __enter__(self):
        empty = torch.empty
        questions = self

        def without_pinning(*sizes, pin_memory=False, **options):
            return empty(*sizes, **options)

        class Event:
            """An event on a simulated stream."""

            def record(self):
                pass

            def synchronize(self):
                questions._count("answer")

        self._changes = ExitStack()
        self._changes.enter_context(patch.object(torch.cuda, "Event", Event))
        self._changes.enter_context(patch.object(torch, "empty", without_pinning))
        return super().__enter__()

    def __exit__(self, *error):
        self._changes.close()
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name not in _ASKING and not name.startswith("index"):  # nearly all
            return func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        on_device = any(tensor.device.type == "cuda" for tensor in tensors)
        if name == "_local_scalar_dense":
            if on_device:
                self._count("number")
            # Numbers [1] are flags, and none is up; numbers [] are counts, by which may be divided.
            return int(not args[0].dim())
        if name == "equal":
            if on_device:
                self._count("equal")
            return False
        target = kwargs.get("device")
        if name == "_to_copy" and target is not None and not kwargs.get("non_blocking"):
            self._count("copy" if {args[0].device.type, torch.device(target).type} == {"cpu", "cuda"} else None)
        if name in _SIZED and on_device:
            self._count(name)
        indices = args[1] if name.startswith("index") and on_device and isinstance(args[1], (list, tuple)) else ()
        if any(index is not None and index.dtype == torch.bool for index in indices):
            self._count("boolean index")
            if name == "index" and len(indices) == 1:  # as if all were true
                return args[0].flatten(0, indices[0].dim() - 1).clone()
        if any(index is not None and index.dim() and index.device.type == "cpu" for index in indices):
            self._count("index from the host")
        return func(*args, **kwargs)

    def _count(self, kind: str | None) -> None:
        if not self.on or kind is None:
            return
        own = [
            frame
            for frame in traceback.extract_stack()
            if ROOT in (file := Path(frame.filename)).parents
            and (ROOT / "tests" not in file.parents or frame.name.startswith("planted"))
            and (kind != "answer" or file.name != "collectives.py")
        ]
        where = f"{Path(own[-1].filename).relative_to(ROOT)} {own[-1].name}" if own else "elsewhere"
        self.found[f"{kind}: {where}"] += 1


class Enough(Exception):
    """Ends an evaluation before its end, which needs values."""


class _On(Callback):
    """Starts counting after the first step, in which things are made once; the transfer of the next batch counts.

    Args:
        questions: what counts.
        accumulate: batches of an optimizer step.
    """

    def __init__(self, questions: Questions, accumulate: int) -> None:
        self.questions = questions
        self.accumulate = accumulate

    def on_fit_start(self, trainer, pl_module):
        act_last(trainer, self)  # behind those that ask at the end of a batch

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.questions.on = batch_idx + 1 >= self.accumulate

    def on_train_epoch_end(self, trainer, pl_module):
        self.questions.on = False

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self.questions.on = batch_idx == 1

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        if self.questions.on:
            self.questions.on = False
            raise Enough

    on_predict_batch_start, on_predict_batch_end = on_validation_batch_start, on_validation_batch_end


class PretendedGPU(SingleDeviceStrategy):
    """Puts a module on the simulated device."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__(device="cuda:0", accelerator=CPUAccelerator())
        self.mode = mode

    def setup_environment(self) -> None:
        pass

    def model_to_device(self) -> None:
        moved: dict[int, torch.Tensor | None] = {id(None): None}

        def move(tensor):
            if id(tensor) not in moved:
                there = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")
                trains = isinstance(tensor, torch.nn.Parameter)
                moved[id(tensor)] = torch.nn.Parameter(there, tensor.requires_grad) if trains else there
            return moved[id(tensor)]

        for part in self.lightning_module.modules():
            for tensors in (part._parameters, part._buffers):
                tensors.update({name: move(tensor) for name, tensor in tensors.items()})
            if isinstance(part, Metric):
                vars(part).update({name: move(vars(part)[name]) for name in part._defaults})
                part._device = torch.device("cuda", 0)
        self.lightning_module._device = torch.device("cuda", 0)

    def teardown(self) -> None:
        pass


def questions(
    module, batch, *callbacks: Callback, folder: Path, precision="bf16-mixed", accumulate=1, stage="fit"
) -> dict[str, int]:
    """How often each function of the package makes the host wait in the second optimizer step, or in an evaluation.

    Args:
        module: on the CPU.
        batch: of every step, or a datamodule of these.
        *callbacks: of the Trainer.
        folder: for the run.
        precision: Lightning's name of it.
        accumulate: batches of an optimizer step.
        stage: "fit", "validate" or "predict"; an evaluation ends after the second batch.
    """
    counted = Questions()

    def log(name, value, *_, **__):  # Lightning's own metrics copy tensors deeply
        if counted.on and isinstance(value, torch.Tensor) and value.device.type != "cuda":
            counted.found[f"logged from the host: {name}"] += 1

    module.log = log
    module.log_dict = lambda values, *_, **__: [log(name, value) for name, value in values.items()]
    module.setup(stage)
    module.configure_model()
    module.configure_model = lambda: None
    plugins = [] if precision == "32-true" else [MixedPrecision(precision, "cuda")]
    with pretended_cuda() as mode, counted:
        runs = trainer(
            _On(counted, accumulate),
            *callbacks,
            strategy=PretendedGPU(mode),
            accelerator="auto",
            devices="auto",
            plugins=plugins,
            max_steps=2,
            accumulate_grad_batches=accumulate,
            limit_val_batches=0 if stage == "fit" else 2,
            inference_mode=False,  # under which operations arrive undivided, such as `to` for `_to_copy`
            default_root_dir=folder,
        )
        own = isinstance(batch, LightningDataModule)
        loader = batch if own else DataLoader([batch] * 2 * accumulate, batch_size=None)
        if stage == "fit":
            runs.fit(module, loader)
            assert runs.global_step == 2
        else:
            with suppress(Enough):
                getattr(runs, stage)(module, loader)
            assert not counted.on
    return dict(counted.found)
