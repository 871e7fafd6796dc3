"""The tables of `orchestrator.session.states` as Mermaid diagrams: prints what docs/states.md holds."""

from orchestrator.session.states import GROWING_TABLE, TARGET_TABLE


def diagram():
    """All tables as Mermaid state diagrams."""
    return "\n\n".join([_diagram("Target", TARGET_TABLE), _diagram("Draft", GROWING_TABLE)])


def _diagram(title, table):
    start = next(iter(table))
    lines = ["```mermaid", "---", f"title: {title}", "---", "stateDiagram-v2", f"    [*] --> {_node(start)}"]
    for state, row in table.items():
        lines += [f"    {_node(state)} --> {_node(after)}: {trigger}" for trigger, after in row.items()]
    return "\n".join([*lines, f"    {_node(list(table)[-1])} --> [*]", "```"])


def _node(state):
    return state.value.replace(" ", "_")


if __name__ == "__main__":
    print(diagram())  # noqa: T201  the program's one output
