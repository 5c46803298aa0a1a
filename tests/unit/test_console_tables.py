"""Tables on the console: what is text stays text, and numbers stand under each other."""

from __future__ import annotations

from rich.console import Console

from mtl.files.tables import Bold, Table


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


def test_names_that_begin_with_a_digit_are_no_numbers() -> None:
    row = ["0_table_comet_seed0", "12 of 40", "1.5 ± 0.5", "-2.1 [-6.5, 2.3]", "1.2e-05", "633,072"]
    assert Table([""] * len(row), [row]).numeric == [False, True, True, True, True, True]


def test_nothing_in_a_table_is_a_command_of_latex() -> None:
    rows = [[r"\input{x}", Bold("0.5 ± 0.1")], ["[1] a_b & 50 % {$~^#}", "-1"]]
    lines = Table(["gate", "loss ↓"], rows, "T_1", ["p < 0.05"]).latex().splitlines()
    assert lines[2:5] == [r"\caption{T\_1}", r"\begin{tabular}{lr}", r"\toprule"]
    assert lines[7:9] == [
        r"\textbackslash{}input\{x\} & \textbf{0.5 $\pm$ 0.1} \\",
        r"{[}1] a\_b \& 50 \% \{\$\textasciitilde{}\textasciicircum{}\#\} & -1 \\",
    ]
    assert lines[-2] == r"\par p $<$ 0.05"


def test_a_wide_table_has_its_rows_as_columns_or_fewer_columns() -> None:
    table = Table(
        ["gate", "loss", "auroc", "mse"], [["comet", "0.51", "0.83", "0.29"], ["topk", "0.52", "0.82", "0.30"]]
    )
    turned = Table(
        ["gate →", "comet", "topk"], [("loss", "0.51", "0.52"), ("auroc", "0.83", "0.82"), ("mse", "0.29", "0.30")]
    )
    assert [table.fitting(width) for width in (80, 27, 26, 21)] == [table, table, turned, turned]
    few = table.fitting(20)
    assert (few.header, few.rows[0]) == (["gate", "loss", "auroc"], ["comet", "0.51", "0.83"])
    assert few.notes == ["Not shown here: mse."]
    assert table.fitting(20).fitting(3).fitting(3).notes == ["Not shown here: mse.", "Not shown here: auroc."]
