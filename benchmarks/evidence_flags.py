"""What follows ``--`` in a command of :mod:`evidence`: flags of ``cocor-train`` that go to every run.

Flags that the study itself sets are refused there: they would make runs equal that are compared or averaged, and the
table would not show it.
"""

from collections.abc import Sequence
from typing import Any

from cocor.config.parse import flag
from evidence_studies import Variant
from loaders.errors import UserError

_BEFORE = {"data": "--data", "val_data": "--val-data", "method": "--methods", "seed": "--seeds", "epochs": "--epochs"}
_BEFORE |= {"gpus": "--gpus", "output": "--output", "config": "--configs"}
_NEVER = {
    **dict.fromkeys(("dry_run", "profile"), "nothing would be trained; leave it out"),
    **dict.fromkeys(("resume", "overwrite"), "the same command goes on, another --output begins anew; leave it out"),
}


def shared_flags(words: Sequence[str], variants: Sequence[Variant]) -> dict[str, Any]:
    """``--lr 0.1 --stem=small --no-sync-bn`` as flags by name.

    Raises:
        UserError: a word that belongs to no flag, or a flag that the study or one of its ``variants`` sets.
    """
    flags = _read(words)
    for key in flags:
        if key in _BEFORE:
            raise UserError(f"{flag(key)} behind the --: the study sets it; give {_BEFORE[key]} before the --")
        if key in _NEVER:
            raise UserError(f"{flag(key)} behind the --: {_NEVER[key]}")
        for variant in variants:
            if key in variant.flags:
                remedy = "leave it out, or choose other variants by --only"
                raise UserError(f"{flag(key)} behind the --: the variant {variant.key} sets it; {remedy}")
    return flags


def _read(words: Sequence[str]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    key = None
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            key = name.replace("-", "_")
            result[key] = value if equals else "true"
            if name.startswith("no-") and not equals:
                del result[key]
                result[name[3:].replace("-", "_")] = "false"
        elif key is None:
            raise UserError(f"{word}: flags of cocor-train begin with --")
        else:
            result[key], key = word, None
    return result
