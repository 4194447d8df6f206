"""Draws the six states of a unit and the legal moves: a picture of docs/explanation/schedule.md.

python docs/figures/states.py docs/figures/states.svg

The moves are those of shardrt/fsdp/unit.py.
"""

from drawing import DARK, EMPTY, GREY, PARAMETERS, Drawing, write

from shardrt.fsdp.unit import _MOVES, State

WIDTH, HEIGHT = 132, 44
# Centre of each state, its second line, and its colour.
PLACES = {
    State.SHARDED: (90, 150, "1/N on each rank", EMPTY),
    State.GATHERING: (270, 60, "all-gather issued", "#9ecae9"),
    State.IN_USE: (470, 60, "ops read it", PARAMETERS),
    State.WAITING: (670, 60, "may be called again", "#72b7b2"),
    State.KEPT: (670, 150, "kept for backward", "#72b7b2"),
    State.STALE: (470, 240, "shards were written", "#eeca3b"),
}
# The way of each arrow: points of an SVG path, the last one with a head.
WAYS = {
    (State.SHARDED, State.GATHERING): [(90, 128), (90, 54), (204, 54)],
    (State.GATHERING, State.SHARDED): [(204, 68), (110, 68), (110, 128)],
    (State.GATHERING, State.IN_USE): [(336, 60), (404, 60)],
    (State.IN_USE, State.WAITING): [(536, 54), (604, 54)],
    (State.WAITING, State.IN_USE): [(604, 68), (536, 68)],
    (State.IN_USE, State.KEPT): [(536, 76), (570, 76), (570, 140), (604, 140)],
    (State.KEPT, State.IN_USE): [(604, 154), (520, 154), (520, 82)],
    (State.IN_USE, State.STALE): [(486, 82), (486, 218)],
    (State.IN_USE, State.SHARDED): [(440, 82), (440, 136), (156, 136)],
    (State.WAITING, State.SHARDED): [(736, 60), (750, 60), (750, 290), (60, 290), (60, 172)],
    (State.KEPT, State.SHARDED): [(604, 164), (156, 164)],
    (State.WAITING, State.STALE): [(736, 70), (743, 70), (743, 248), (536, 248)],
    (State.KEPT, State.STALE): [(670, 172), (670, 232), (536, 232)],
    (State.STALE, State.SHARDED): [(404, 240), (110, 240), (110, 172)],
}


def picture() -> Drawing:
    """States as boxes, moves as arrows."""
    moves = {(one, other) for one, others in _MOVES.items() for other in others}
    if moves != WAYS.keys():
        raise ValueError(f"draw these moves, or no longer: {moves ^ WAYS.keys()}")
    drawing = Drawing(760, 344, "The six states of a unit and the moves between them")
    for (_, other), points in WAYS.items():
        stroke = GREY if other is State.SHARDED else "#333333"
        start = " L".join(f"{x} {y}" for x, y in points[:-1])
        drawing.path(f"M{start}", stroke)
        drawing.arrow(*points[-2], *points[-1], stroke)
    for state, (x, y, meaning, fill) in PLACES.items():
        drawing.box(x - WIDTH / 2, y - HEIGHT / 2, WIDTH, HEIGHT, fill, rx=5)
        ink = "#ffffff" if fill == PARAMETERS else DARK
        drawing.text(x, y - 3, state.name, ink, "middle", bold=True)
        drawing.text(x, y + 14, meaning, ink, "middle")
    drawing.key(
        24,
        330,
        [
            (EMPTY, "no whole parameters"),
            ("#9ecae9", "on their way"),
            (PARAMETERS, "in use"),
            ("#72b7b2", "there"),
            ("#eeca3b", "there, old values"),
        ],
    )
    return drawing


if __name__ == "__main__":
    write(picture)
