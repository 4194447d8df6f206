def events(names, prefetch):
    lines = ["gather root"]
    for backward in (False, True):
        order = names[::-1] if backward else names
        gathered = 0
        for place, name in enumerate(order):
            while gathered < min(place + prefetch + 1, len(order)):
                lines.append(f"gather {order[gathered]}")
                gathered += 1
            lines.append(f"release {name}")
            if backward:
                lines.append(f"reduce {name}")
    lines.append("release root")
    return lines
