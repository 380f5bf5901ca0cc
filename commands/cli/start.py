"""Start of the command line: what needs no torch is answered before torch is imported, which takes seconds."""

import os
import sys
from importlib.metadata import version

from ...common.errors import UserError
from ..compare.command import run_compare
from ..new.command import run_new
from .listing import COMMANDS, configs, methods, run_configs, run_methods

START = """\
Vision-language pre-training and distillation in PyTorch Lightning.

Train on drawn shapes, without a download, in minutes on two CPU cores:
  vlightning fit --config configs/albef/quickstart.yaml
Look at the curves while it trains (in another terminal):
  tensorboard --logdir runs
Stop it with Ctrl-C; go on where it stopped:
  vlightning fit --config configs/albef/quickstart.yaml --ckpt_path last

Then:
  vlightning methods           which method for which data
  vlightning configs {method}     the configs of a method, each with its command
  vlightning --help            all commands
"""


def welcome() -> str:
    """Return what `vlightning` alone prints: what to type first."""
    return START.format(method=next(iter(methods())).name)


def help_page() -> str:
    """Return what `vlightning --help` prints: every command in a line."""
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:<{width}}{summary}" for name, summary in COMMANDS.items()]
    return "\n".join(
        [
            "usage: vlightning COMMAND [--config FILE.yaml ...] [--OPTION VALUE ...]",
            "",
            "Train and evaluate vision-language models, as in",
            "  vlightning fit --config configs/albef/quickstart.yaml",
            "",
            "commands (each has a --help):",
            *lines,
            "",
            "options:",
            f"  {'--help':<{width}}show this page",
            f"  {'--version':<{width}}print the version",
            f"  {'--debug':<{width}}keep the traceback of an error",
            "",
        ]
    )


OPTIONS = {
    "fit validate test predict": "--config --ckpt_path --print_config --help --model.help --data.help --compile",
    "plan": "--config --devices --gpu --batch --mfu --precision --steps --help",
    "data": "--config --limit --out --help",
    "embed": "--weights --output --config --split --views --of --seed --shard_size --batch_size --num_workers "
    "--accelerator --devices --num_nodes --help",
    "search": "--weights --by --of --count --device --html --captions --caption_column --image_column --cache "
    "--batch_size --num_workers --method --model --help",
    "compare": "--output --seeds --first_seed --baseline --metric --mode --test --sweep --trials --jobs --threads "
    "--help",
    "demo": "--model --weights --images --store --captions --caption_column --image_column --classes --port "
    "--cache --batch_size --num_workers --device --help",
}

SCRIPT = """\
# Completion of vlightning in bash and zsh: eval "$(vlightning completion)"
if [ -n "$ZSH_VERSION" ]; then
  type compdef > /dev/null || {{ autoload -U compinit && compinit; }}
  autoload -U +X bashcompinit && bashcompinit
fi
_vlightning() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} words=""
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="{commands} --help --version"
  elif [ "$before" = "--config" ] || [ "$before" = "-c" ]; then
    words="{configs}"
  else
    case "${{COMP_WORDS[1]}}" in
      configs) words="{methods}" ;;
{options}
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word") $([ "$COMP_CWORD" -gt 1 ] && compgen -f -- "$word"))
}}
complete -o filenames -F _vlightning vlightning
"""


def run_completion(words: list[str]) -> str:
    """Run `vlightning completion`.

    Raises:
        UserError: If there are other words than `bash` or `zsh`.
    """
    if words and words[0] in ("--help", "-h"):
        return 'usage: eval "$(vlightning completion)" in ~/.bashrc or ~/.zshrc\n'
    if words and words not in (["bash"], ["zsh"]):
        raise UserError(f"Expected bash or zsh after completion, got {' '.join(words)!r}: other shells have none.")
    options = [f'      {"|".join(names.split())}) words="{given}" ;;' for names, given in OPTIONS.items()]
    return SCRIPT.format(
        commands=" ".join(COMMANDS),
        configs=" ".join(config.path for config in configs()),
        methods=" ".join(method.name for method in methods()),
        options="\n".join(options),
    )


LISTS = {
    "methods": run_methods,
    "configs": run_configs,
    "completion": run_completion,
    "new": run_new,
    "compare": run_compare,
}


def answer(words: list[str]) -> str | None:
    """Return the answer to a command line that needs no torch; None for other command lines.

    Raises:
        SystemExit: With status 2, if a name is unknown.
    """
    match [word for word in words if word != "--debug"]:
        case []:
            return welcome()
        case ["--version"]:
            return f"vlightning {version('vlightning')}\n"
        case ["--help" | "-h"]:
            return help_page()
        case [command, *rest] if command in LISTS:
            try:
                return LISTS[command](rest)
            except UserError as error:
                sys.stderr.write(f"vlightning: error: {error}\n")
                raise SystemExit(2) from None
    return None


def let_threads_sleep() -> None:
    """Let threads that wait for one another sleep in place of spinning, where other work wants the processors.

    A thread that spins takes the time of the one that it waits for: docs/performance.md has the figures. An idle
    machine keeps the default of torch's OpenMP, which reads the variable when torch is imported.
    """
    if os.getloadavg()[0] >= (os.cpu_count() or 1) / 2:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def main(args: list[str] | None = None) -> None:
    """Run the command line.

    Args:
        args: The arguments of the program; None for those in `sys.argv`.

    Raises:
        SystemExit: If the user can fix an error; the status is 2 for the command line, and 1 for a run that stopped.
    """
    words = sys.argv[1:] if args is None else list(args)
    if (text := answer(words)) is not None:
        sys.stdout.write(text)
        return
    if "torch" not in sys.modules:
        let_threads_sleep()
    from .commands import run

    run(args, words)
