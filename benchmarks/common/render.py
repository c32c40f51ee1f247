"""Turns the record of a benchmark (its --json file) into tables: one for the terminal, a page in Markdown.

    python -m benchmarks.common.render RECORD.json                     # print the page
    python -m benchmarks.common.render RECORD.json --directory DIRECTORY  # write it there, with the record

A benchmark that made a table of its own has that one; the others have a row for each case.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.options import new_parser
from dist_autotune.tables import as_lines, table

Row = tuple[str, ...]


def summary(record: dict[str, Any]) -> str:
    """Return the short table for a terminal, with the reasons of what is missing below it."""
    if "table" in record:
        own = record["table"]
        columns = [f">{name}" if name in own["figures"] else name for name in own["columns"]]
        lines = as_lines(table("", columns, own["rows"]))
        return "\n".join([f"{record['title']}, {hardware(record)}", *lines, *own["notes"]])
    columns, rows = _summary(record)
    lines = [f"{record['title']}, {hardware(record)}, ms (median, slowest rank)"]
    if "event" not in record["figures"]:
        lines.append(record["figures"])
    if without_multicast(record):
        lines.append(without_multicast(record))
    turned = list(zip(columns, *rows, strict=True))  # cases side by side: arms are too many for one line
    lines += as_lines(table("", [turned[0][0], *(f">{name}" for name in turned[0][1:])], turned[1:]))
    return "\n".join([*lines, *_reasons(record), *_means(record)])


def page(record: dict[str, Any]) -> str:
    """Return the Markdown page of a record."""
    versions = ", ".join(f"{name} {text}" for name, text in record["versions"].items())
    variables = " ".join(f"{name}={text}" for name, text in record["variables"].items())
    lines = [
        f"{record['date'][:10]}, `{record['command']}`, commit {record['commit']}.",
        f"{versions}.",
        variables,
        without_multicast(record),
    ]
    head = [f"# {record['title']}, {hardware(record)}", "\n".join(line for line in lines if line)]
    if "table" in record:  # made by the benchmark itself
        table = record["table"]
        clocks = ", ".join(f"{name} {text}" for name, text in record.get("clocks", {}).items())
        notes = "\n".join(table["notes"]) + (f"\nAt the end: {clocks}." if clocks else "")
        more = [
            f"## {other['title']}\n\n{_markdown(other['columns'], other['rows'])}"
            for other in record.get("more_tables", [])
        ]
        return "\n\n".join([*head, _markdown(table["columns"], table["rows"]), notes, *more]) + "\n"
    parts = [
        *head,
        f"{_figures(record)} Median of {record['iterations']} calls on each rank, then the slowest rank.\n"
        "All arms interleaved in one process group, with new random normal inputs in every round, after\n"
        f"{record['warm_ups']} launches to warm up; results checked against float32 before and after.\n"
        "Protocol and traps: `benchmarks/common/arms.py`.",
        _markdown(*_summary(record)),
        "\n".join(f"* {reason}" for reason in (*_reasons(record), *_means(record))),
        "## Each arm",
        _markdown(*_details(record)),
        "host: what the call takes on the host. Error: of the result against float32, relative norm.",
        _tuned(record),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def without_multicast(record: dict[str, Any]) -> str:
    """Return the line that says who did without NVLink multicast; empty: nobody that is known of."""
    set_to = record["variables"]
    if record["hardware"]["world_size"] == 1 or set_to.get("NCCL_NVLS_ENABLE") != "0":
        return ""
    torch_too = set_to.get("TORCH_SYMM_MEM_DISABLE_MULTICAST") == "1"
    who = "NCCL and torch's symmetric memory" if torch_too else "NCCL"
    return f"{who} ran without NVLink multicast: these variables switch it off."


def file_stem(record: dict[str, Any]) -> str:
    """Return `<op>_<hardware>_<date>`."""
    device = re.sub(r"[^A-Za-z0-9]+", "-", record["hardware"]["device"].removeprefix("NVIDIA ")).strip("-")
    return f"{record['op']}_{record['hardware']['world_size']}x{device}_{record['date'][:10]}"


def hardware(record: dict[str, Any]) -> str:
    """Return such as `2 x NVIDIA H200`."""
    return f"{record['hardware']['world_size']} x {record['hardware']['device']}"


def _figures(record: dict[str, Any]) -> str:
    return "Times by CUDA events." if "event" in record["figures"] else f"**{record['figures']}**"


def _summary(record: dict[str, Any]) -> tuple[Row, list[Row]]:
    """Return a row for each case: times, then the ratios that the record asks for."""
    names = _arm_names(record)
    columns = (record["case_title"], *names, *(ratio["name"] for ratio in record["ratios"]))
    rows = []
    for case in record["cases"]:
        ms = {arm["name"]: arm.get("ms") for arm in case["arms"]}
        marks = {arm["name"]: "*" if arm.get("host_bound") else "" for arm in case["arms"]}
        figures = [_ms(ms.get(name)) + marks.get(name, "") for name in names]
        ratios = [_ratio(ms.get(ratio["of"]), ms.get(ratio["to"])) for ratio in record["ratios"]]
        rows.append((case["case"], *figures, *ratios))
    return columns, rows


FURTHER = {  # figures that not every record has
    "host_hot_ms": "host ms, hot",
    "before_capture_ms": "ms before a capture",
    "before_capture_host_ms": "host ms before a capture",
}


def _details(record: dict[str, Any]) -> tuple[Row, list[Row]]:
    further = {
        name: text
        for name, text in FURTHER.items()
        if any(name in arm for case in record["cases"] for arm in case["arms"])
    }
    own = ("arm", "ms", "10 %", "90 %", "rate", "host ms", "error")
    columns = (record["case_title"], *own, *further.values())
    rows = []
    for case in record["cases"]:
        for arm in case["arms"]:
            if "unavailable" in arm:
                continue
            low, high = (record["quantiles"].index(quantile) for quantile in (0.1, 0.9))
            slowest = max(arm["ranks_ms"], key=lambda of_rank: of_rank[record["quantiles"].index(0.5)])
            rate = f"{arm['rate']:.4g} {arm['rate_unit']}" if arm["rate_unit"] else ""
            times = (_ms(arm["ms"]), _ms(slowest[low]), _ms(slowest[high]))
            figures = (*times, rate, _ms(arm["host_ms"]), f"{arm['error']:.1e}")
            rows.append((case["case"], arm["name"], *figures, *(_ms(arm.get(name)) for name in further)))
    return columns, rows


def _tuned(record: dict[str, Any]) -> str:
    """Return what was tuned in each case, and the clocks seen after it."""
    columns = (record["case_title"], "winner", "timed", "runs", "status", "clocks after the timing")
    rows = []
    for case in record["cases"]:
        clocks = ", ".join(f"{name} {text}" for name, text in case["clocks"].items())
        nothing = {"config": "one candidate: nothing to tune", "timed": 0, "status": ""}
        for context in case["tuned"]["contexts"] or [nothing]:
            figures = (str(context["timed"]), str(case["tuned"]["runs"]), context["status"])
            copied = context.get("copied")  # operands that passed through scratch memory
            config = f"{context['config']}; copied: {', '.join(copied)}" if copied else context["config"]
            rows.append((case["case"], config, *figures, clocks))
    return f"## What was tuned\n\n{_markdown(columns, rows)}"


def _reasons(record: dict[str, Any]) -> list[str]:
    """Return a line for each arm that is missing and why, and for what marks mean."""
    found: dict[tuple[str, str], list[str]] = {}
    for case in record["cases"]:
        for arm in case["arms"]:
            if "unavailable" in arm:
                found.setdefault((arm["name"], arm["unavailable"]), []).append(case["case"])
    lines = []
    for (name, reason), cases in found.items():
        where = "" if len(cases) == len(record["cases"]) else f" for {', '.join(cases)}"
        lines.append(f"{name}: n/a{where}: {reason}")
    for case in record["cases"]:
        lines += [f"{case['case']}: trouble at closing: {reason}" for reason in case["trouble_at_closing"]]
    if any(arm.get("host_bound") for case in record["cases"] for arm in case["arms"]):
        lines.append(
            "*: the device waited for the host in more than a tenth of the calls; its gaps are in the figure"
        )
    return lines


def _means(record: dict[str, Any]) -> list[str]:
    """Return a line for each ratio that several cases have."""
    return [
        f"{name}: {found['mean']:.3f} in the geometric mean of {found['cases']}, least {found['least']:.3f}"
        for name, found in record.get("geometric_means", {}).items()
        if found["cases"] > 1
    ]


def _arm_names(record: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(arm["name"] for case in record["cases"] for arm in case["arms"]))


def _ms(ms: float | None) -> str:
    if ms is None:
        return "n/a"
    return f"{ms:.3f}" if ms < 100 else f"{ms:.0f}"


def _ratio(of: float | None, to: float | None) -> str:
    return "n/a" if of is None or to is None else f"{of / to:.3f}"


def _markdown(columns: Sequence[str], rows: Sequence[Row]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("record", type=Path, help="a --json file")
    parser.add_argument("--directory", type=Path, help="for page and record")
    options = parser.parse_args()
    text = options.record.read_text()
    record = json.loads(text)
    if options.directory is None:
        print(page(record), end="")
        return
    options.directory.mkdir(parents=True, exist_ok=True)
    for suffix, content in ((".md", page(record)), (".json", text)):
        path = options.directory / f"{file_stem(record)}{suffix}"
        path.write_text(content)
        print(path)


if __name__ == "__main__":
    main()
