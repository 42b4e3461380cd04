"""Plain data as a YAML document: by PyYAML where it is installed, else as JSON, which YAML includes."""

from __future__ import annotations

import json
import re
from typing import Any

# Strings that no version of YAML takes for anything else; PyYAML leaves numbers such as 1e3 and the boolean y of
# Kubernetes's YAML without quotes.
_PLAIN = re.compile(r"(?![yYnN]$)[A-Za-z_/][A-Za-z0-9_./-]*")
# Characters that JSON leaves as they are, and YAML takes for the end of a line, or does not take.
_ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ufeff]")


def to_yaml(value: object) -> str:
    """Writes a value as a YAML document.

    Args:
        value: Mappings with strings as names, sequences, strings, whole numbers, booleans.

    Returns:
        The document, which ends in a newline.
    """
    try:
        import yaml
    except ImportError:
        document = json.dumps(value, indent=2, ensure_ascii=False)
        return _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", document) + "\n"

    class Dumper(yaml.SafeDumper):
        """Writes lists as people do: indented under their name. No anchors, which few know."""

        def increase_indent(self, flow: bool = False, indentless: bool = False) -> Any:
            return super().increase_indent(flow, False)

        def ignore_aliases(self, data: object) -> bool:
            return True

    def text(dumper: Any, one: str) -> Any:
        style = None if _PLAIN.fullmatch(one) else "'"
        return dumper.represent_scalar("tag:yaml.org,2002:str", one, style=style)

    Dumper.add_representer(str, text)
    return str(yaml.dump(value, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=2**16))
