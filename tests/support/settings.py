"""Arguments of modules with groups of settings."""


def merged(*parts):
    """Arguments of which later ones win; groups are merged too."""
    found = {}
    for part in parts:
        for name, value in part.items():
            found[name] = merged(found[name], value) if isinstance(value, dict) and name in found else value
    return found
