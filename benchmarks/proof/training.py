"""One run of a claim in a process of its own: count, train or resume, test, and append the line."""

import hashlib
import json
import os
import platform
import runpy
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tables import last_checkpoint

from proof.claim import Claim, Preparation, Probe, Run, Variant, filled, load_claim
from proof.hashes import ROOT, config_hash, resolved_config, step_hashes
from proof.plan import DONE, Folders, reference_flops
from proof.results import Line, append_line, only_process
from vlightning.callbacks.speed import CountFlops
from vlightning.cli import main as vlightning

ELSEWHERE = 75
"""Exit status of a run that another process does."""


class Counted(NamedTuple):
    """What a step of a training costs.

    Attributes:
        flops: of a step, forward and backward, with all teachers.
        steps: steps of an epoch.
    """

    flops: int
    steps: int


def execute(claim_name: str, run: Run, folders: Folders) -> None:
    """Do a run, in the process that the driver starts for it; exit with a status.

    Args:
        claim_name: name or file of the claim.
        run: the run.
        folders: where to read and write.
    """
    os.setsid()  # Ctrl-C in the driver's terminal reaches the driver, which ends its runs with a checkpoint
    torch.set_num_threads(1)
    folder = folders.of(run)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "output.txt").open("a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    status = 0
    try:
        with only_process(folder) as alone:
            if alone:
                OneRun(load_claim(claim_name), run, folders).do()
            else:
                status = ELSEWHERE
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class OneRun:
    """A run with its words.

    Args:
        claim: the claim.
        run: the run.
        folders: where to read and write.
    """

    def __init__(self, claim: Claim, run: Run, folders: Folders) -> None:
        self.claim = claim
        self.run = run
        self.folders = folders
        self.folder = folders.of(run)
        self.texts = {**claim.variables, "data": folders.data, "work": str(folders.work)}
        self.texts["accelerator"] = folders.accelerator
        self.texts |= _texts("folder", self.folder)
        for preparation in claim.all_preparations:
            self.texts |= _texts(preparation.name, folders.of(claim.run_of(preparation, run.seed)))
        self.trained: Preparation | Variant
        if run.budget:
            self.trained = claim.variant(run.variant)
            rate = f"{claim.learning_rate_option}={run.learning_rate}"
            self.words = [*claim.words, *self.trained.words, rate]
        else:
            self.trained = claim.preparation(run.variant)
            self.words = list(self.trained.words)

    def do(self) -> None:
        """Do what is left of the run, and append its line."""
        marker = self.folder / DONE
        line = json.loads(marker.read_text()) if marker.is_file() else self.measured()
        append_line(self.folders.file(self.claim.name), line)
        unfinished = marker.with_suffix(".part")
        unfinished.write_text(json.dumps(line))
        unfinished.replace(marker)

    def measured(self) -> Line:
        """Train, test, and return the line of results."""
        line: Line = {
            "claim": self.claim.name,
            "variant": self.run.variant,
            "budget": self.run.budget,
            "learning_rate": self.run.learning_rate,
            "seed": self.run.seed,
            "commit": commit(),
            "machine": machine(self.folders.accelerator),
            "once": self._once("flops"),
            "teachers": self._once("metrics"),
        }
        started = time.process_time()
        with CountFlops() as before:
            for script, *words in getattr(self.trained, "before", ()):
                run_script(script, filled(words, self.texts))
        seconds = time.process_time() - started
        if self.words:
            line |= self._train()
        self.texts |= _texts("folder", self.folder)
        started = time.process_time()
        with CountFlops() as after:
            for words in getattr(self.trained, "after", ()):
                command(filled(words, self.texts))
        seconds += time.process_time() - started
        line["flops"] = before.flops + line.get("flops", 0) + after.flops
        line["cpu_seconds"] = round(line.get("cpu_seconds", 0) + seconds, 1)
        test = self.claim.test if isinstance(self.trained, Variant) else self.trained.test
        if test:
            line["metrics"] = self._test(filled(test, self.texts))
        line = {"metrics": {}, "curve": [], **line}
        prefix = self.trained.prefix if isinstance(self.trained, Variant) else ""
        line["metrics"] = without_prefix(line["metrics"], prefix)
        probes = {probe.name: self._probe(probe) for probe in getattr(self.trained, "probes", ())}
        for probe in probes.values():
            line["metrics"] |= probe.pop("metrics")
        line["probes"] = probes
        line["curve"] = [point | {"metrics": without_prefix(point["metrics"], prefix)} for point in line["curve"]]
        return line

    def _train(self) -> Line:
        """Train, or resume a training, unless that is done; return its part of the line."""
        counted = self._counted()
        steps, interval = self._length(counted)
        lengths = {"epoch": steps / counted.steps, "steps": steps}
        symbols = self._symbols(self.texts)
        words = filled(self.words, symbols, lengths)
        words += [f"--seed_everything={self.run.seed}"]
        config = resolved_config(filled([*words, *self._callbacks(symbols, lengths)], {}))
        record = self.folder / "record.json"
        checkpoint = last_checkpoint(self.folder)
        if not record.is_file() or checkpoint is None:
            fit = ["fit", *filled(self.words, self.texts, lengths), *self._trainer(self.folder, record, lengths)]
            fit += [f"--seed_everything={self.run.seed}", f"--trainer.max_steps={steps}"]
            fit += ["--trainer.check_val_every_n_epoch=null", f"--trainer.val_check_interval={interval}"]
            fit += ["--trainer.num_sanity_val_steps=0"]
            command(fit if checkpoint is None else [*fit, f"--ckpt_path={checkpoint}"])
        recorded = json.loads(record.read_text())
        flops = recorded["flops_of_step"] * recorded["steps"]
        return {
            "words": words,
            "callbacks": self._callbacks(symbols, lengths),
            "config_hash": config_hash(config),
            "step": step_hashes(config),
            "config": config,
            "steps": recorded["steps"],
            "steps_of_epoch": counted.steps,
            "flops_of_step": recorded["flops_of_step"],
            "flops": flops,
            "cpu_seconds": round(recorded["cpu_seconds"], 1),
            "curve": recorded["curve"],
            "metrics": recorded["curve"][-1]["metrics"],
        }

    def _counted(self) -> Counted:
        """Count a step of the training with its real module and data, unless that is done."""
        lengths = {"epoch": 1.0, "steps": 1.0}
        words = filled(self.words, self.texts, lengths)
        # Neither a learning rate nor a seed, which folders are named by, changes a shape.
        named = filled(self.words[:-1] if self.run.budget else self.words, self._symbols(self.texts), lengths)
        digest = hashlib.sha256(json.dumps([*named, commit()]).encode()).hexdigest()[:12]
        target = self.folders.work / self.claim.name / "counts" / f"{digest}.json"
        if not target.is_file():
            scratch = target.with_suffix(f".{os.getpid()}")
            record = scratch / "record.json"
            fit = ["fit", *words, *self._trainer(scratch, record, lengths), "--trainer.max_steps=1"]
            command([*fit, "--trainer.limit_val_batches=0", "--trainer.num_sanity_val_steps=0"])
            record.replace(target)
            shutil.rmtree(scratch, ignore_errors=True)
        counted = json.loads(target.read_text())
        return Counted(counted["flops_of_step"], counted["steps_of_epoch"])

    def _symbols(self, texts: Mapping[str, str]) -> dict[str, str]:
        """Return texts with the names of folders in place of the folders, which differ between machines and seeds."""
        return {name: name for name in texts} | dict(self.claim.variables) | {"configs": "${configs}"}

    def _length(self, counted: Counted) -> tuple[int, int]:
        """Return the steps of the training, a multiple of the steps between two validations, and those."""
        if isinstance(self.trained, Preparation):
            steps = self.trained.epochs * counted.steps
        else:
            budget = self.claim.budget(self.run.budget)
            flops = budget.flops
            if budget.like is not None:
                flops = reference_flops(budget.like, self.folders.lines(self.claim))
            steps = flops / counted.flops if flops is not None else (budget.epochs or 1.0) * counted.steps
        return rounded(steps, self.claim.evaluations)

    def _trainer(self, folder: Path, record: Path, lengths: Mapping[str, float]) -> list[str]:
        """Return the arguments of the Trainer that are the driver's."""
        recorder = {"class_path": "proof.recording.Recorder", "init_args": {"file": str(record)}}
        callbacks = [*self._callbacks(self.texts, lengths, as_words=False), recorder]
        return [
            *(f"--trainer.callbacks={json.dumps(callbacks)}", "--checkpoint.save_top_k=0"),
            *self._without_display(folder),
        ]

    def _without_display(self, folder: Path) -> list[str]:
        """Return the arguments of the Trainer for one device, with its log in a folder, and nothing on the screen."""
        return [
            *(f"--trainer.accelerator={self.folders.accelerator}", "--trainer.devices=1", "--trainer.logger=CSVLogger"),
            *(f"--trainer.logger.save_dir={folder}", "--trainer.logger.name=", "--trainer.enable_progress_bar=false"),
            "--trainer.enable_model_summary=false",
        ]

    def _callbacks(self, texts: Mapping[str, str], lengths: Mapping[str, float], as_words: bool = True) -> list[Any]:
        """Return the callbacks of the claim, as a list or as the words of an argument."""
        texts_of_callbacks = [json.dumps(callback) for callback in self.trained.callbacks]
        callbacks = [json.loads(text) for text in filled(texts_of_callbacks, texts, lengths)]
        if not as_words:
            return callbacks
        return [f"--trainer.callbacks={json.dumps(callbacks)}"] if callbacks else []

    def _test(self, words: Sequence[str]) -> dict[str, float]:
        """Measure the last checkpoint on the test split."""
        test = ["test", f"--ckpt_path={last_checkpoint(self.folder)}", *words, "--trainer.logger=CSVLogger"]
        test += [f"--trainer.logger.save_dir={self.folder}", "--trainer.logger.name=test"]
        command([*test, "--trainer.enable_progress_bar=false", f"--trainer.accelerator={self.folders.accelerator}"])
        files = self.folder.glob("test/version_*/metrics.json")
        newest = max(files, key=lambda path: path.stat().st_mtime)
        metrics: dict[str, float] = json.loads(newest.read_text())["metrics"]
        return metrics

    def _probe(self, probe: Probe) -> Line:
        """Train a probe on the last checkpoint, unless that is done; return what it depends on, and its metrics."""
        lengths = {"epoch": float(probe.epochs)}
        texts = self.texts | {"checkpoint": str(last_checkpoint(self.folder))}
        symbols = self._symbols(texts)
        words = filled(probe.words, symbols, lengths)
        config = resolved_config(filled(words, {}))
        folder = self.folder / f"probe_{probe.name}"
        record = folder / "record.json"
        if not record.is_file():
            recorder = [{"class_path": "proof.recording.Recorder", "init_args": {"file": str(record)}}]
            fit = ["fit", *filled(probe.words, texts, lengths), f"--trainer.callbacks={json.dumps(recorder)}"]
            fit += [*self._without_display(folder), f"--seed_everything={self.run.seed}"]
            fit += [f"--trainer.max_epochs={probe.epochs}", f"--trainer.check_val_every_n_epoch={probe.epochs}"]
            command([*fit, "--trainer.num_sanity_val_steps=0"])
        last = json.loads(record.read_text())["curve"][-1]["metrics"]
        metrics = {name.replace("val/", f"{probe.name}/", 1): value for name, value in last.items()}
        return {"words": words, "config": config, "step": step_hashes(config), "metrics": metrics}

    def _once(self, name: str) -> dict[str, Any]:
        """Return an entry of the lines of all preparations that the run needs, by their names."""
        found = {}
        for preparation in self.claim.needed(self.trained.needs):
            marker = self.folders.of(self.claim.run_of(preparation, self.run.seed)) / DONE
            found[preparation.name] = json.loads(marker.read_text())[name]
        return found


def rounded(steps: float, evaluations: int) -> tuple[int, int]:
    """Return the number of steps next to `steps` that validations at equal distances divide, and the distance.

    Args:
        steps: steps that are asked for.
        evaluations: number of validations; fewer if there are fewer steps.
    """
    whole = max(1, round(steps))
    evaluations = min(evaluations, whole)
    interval = max(1, round(steps / evaluations))
    return interval * evaluations, interval


def without_prefix(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    """Return metrics without `prefix` in their names; those that held it replace others of the same name.

    Args:
        metrics: metrics by name, such as `test/h2/recall_mean`.
        prefix: the text, such as `h2/`; empty for the same names.
    """
    if not prefix:
        return dict(metrics)
    others = {name: value for name, value in metrics.items() if prefix not in name}
    return others | {name.replace(prefix, ""): value for name, value in metrics.items() if prefix in name}


def _texts(name: str, folder: Path) -> dict[str, str]:
    """Return the texts that name a run's folder and its last checkpoint, whose file exists after the run."""
    checkpoint = last_checkpoint(folder) or folder / "version_0/checkpoints/last.ckpt"
    return {name: str(folder), f"{name}_checkpoint": str(checkpoint)}


def run_script(name: str, words: Sequence[str]) -> None:
    """Run a script of this folder in this process.

    Args:
        name: its file.
        words: its arguments.
    """
    print(name, *words, flush=True)
    functions = runpy.run_path(str(Path(__file__).with_name(name)))
    functions["main"](list(words))


def command(words: Sequence[str]) -> None:
    """Run a command of the command line in this process.

    Raises:
        SystemExit: With its status, if it fails or is interrupted.
    """
    print("vlightning", *words, flush=True)
    status = vlightning(list(words))
    if status:
        raise SystemExit(status)


def commit() -> str:
    """Return the commit of the repository, with `+` if tracked files differ from it.

    In a copy without its history, as on a machine of a cluster, the variable `PROOF_COMMIT` names it.
    """

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False).stdout

    if name := os.environ.get("PROOF_COMMIT"):
        return name
    changed = git("status", "--porcelain", "--untracked-files=no", "--", "*.py", "*.yaml").strip()
    return git("rev-parse", "--short=12", "HEAD").strip() + ("+" if changed else "")


def machine(accelerator: str) -> dict[str, Any]:
    """Return the processor, its cores, the GPU if one is used, and the version of torch."""
    found: dict[str, Any] = {"processor": processor(), "cores": os.cpu_count(), "torch": torch.__version__}
    if accelerator != "cpu" and torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def processor() -> str:
    """Return the name of the processor."""
    file = Path("/proc/cpuinfo")
    if file.is_file():
        for line in file.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
