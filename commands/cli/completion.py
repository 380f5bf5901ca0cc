"""Completion in bash and zsh. The script holds the names, since asking the parser would import torch at each key."""

from ...common.errors import UserError
from .listing import configs, methods
from .pages import COMMANDS

OPTIONS = {
    "fit validate test predict": "--config --ckpt_path --print_config --help --model.help --data.help --compile",
    "plan": "--config --devices --gpu --batch --mfu --precision --steps --help",
    "data": "--config --limit --out --help",
    "demo": "--model --weights --images --captions --classes --port --cache --batch_size --num_workers --device --help",
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

    Args:
        words: The arguments after `completion`; none are needed.

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
