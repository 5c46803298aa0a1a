"""Tables on the console: what is text stays text, and numbers stand under each other."""

from __future__ import annotations

from rich.console import Console

from mtl.files.tables import Table


def test_numbers_are_on_the_right_and_texts_are_no_markup() -> None:
    console = Console(width=60)
    rows = [["[red]a[/red]", "0.5", "1.3 ± 0.1 against 2.8 ± 0.1"], ["b\x1b[2J", "-", "not run"]]
    with console.capture() as capture:
        console.print(Table(["task", "auroc", "runs"], rows))
    header, _, first, second = capture.get().splitlines()
    assert first.split("   ")[0] == "[red]a[/red]"
    assert "\x1b" not in second
    assert header.index("auroc") + len("auroc") == first.index("0.5") + 3 == second.rindex("- ") + 1
    assert first.index("1.3") == second.index("not run") == header.index("runs")
