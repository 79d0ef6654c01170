"""`spindle profile --merge`."""

from __future__ import annotations

from pathlib import Path

from spindle_cli.cli import output


def merge_profiles(paths: list[Path], output_path: Path, *, is_alone: bool, as_json: bool) -> None:
    """Put profiles together and report what they are now.

    Args:
        is_alone: nothing is given that profiling takes.

    Raises:
        UsageError: fewer than two profiles, or not alone.
        InputError: a profile is missing, malformed, or does not belong to the others.
    """
    from spindle_cli.cli.profile_summary import curve_table, summarise
    from spindle_cli.errors import UsageError
    from spindle_cli.files.artifact import write_json
    from spindle_cli.files.writing import require_no_input, require_no_other
    from spindle_cli.profile.mixed.merging import merge
    from spindle_cli.profile.types import Profile

    if not paths:
        raise UsageError("a WORKLOAD to profile is missing", hint="Name one; or profiles to --merge.")
    if not is_alone:
        raise UsageError(
            "--merge: profiles that are there are put together, and nothing is profiled",
            hint="Give --merge A.json --merge B.json -o BOTH.json alone.",
        )
    if len(paths) < 2:
        raise UsageError("--merge: one profile; expected two or more", hint="Repeat it: --merge A --merge B.")
    require_no_input("-o", output_path, *paths)
    require_no_other("-o", output_path, "profile")
    made = merge([(path, Profile.read(path)) for path in paths])
    write_json(output_path, made)
    output.note(f"wrote {output_path}")
    output.report(as_json, summarise(output_path, made), curve_table(made))
