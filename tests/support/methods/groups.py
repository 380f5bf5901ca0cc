"""Options of a module by the names of single settings."""

import dataclasses
import inspect


def in_groups(module, options):
    """Constructor arguments of a module in groups, from single settings.

    A setting goes into the only group that has it, unless the constructor has an argument of that name; a name such as
    `teacher.weights` says the group. Groups given as dictionaries are merged with that.
    """
    parameters = inspect.signature(module).parameters
    groups = {name: p.default for name, p in parameters.items() if dataclasses.is_dataclass(p.default)}
    found = {}
    for name, value in options.items():
        group, dot, field = name.partition(".")
        if dot:
            found.setdefault(group, {})[field] = value
        elif name in groups:
            found.setdefault(name, {}).update(value)
        elif name in parameters:
            found[name] = value
        else:
            (owner,) = [group for group, default in groups.items() if name in vars(default)]
            found.setdefault(owner, {})[name] = value
    return found


def merged(*parts):
    """Constructor arguments of which later ones win; groups are merged too."""
    found = {}
    for part in parts:
        for name, value in part.items():
            found[name] = merged(found[name], value) if isinstance(value, dict) and name in found else value
    return found


def command_line(module, options, section="model"):
    """The same options as words of a command line, such as `--model.optim.learning_rate 0.1`."""
    words = []
    for name, value in in_groups(module, options).items():
        for field, part in value.items() if isinstance(value, dict) else [(None, value)]:
            words += [f"--{section}.{name}.{field}" if field else f"--{section}.{name}", str(part)]
    return words
