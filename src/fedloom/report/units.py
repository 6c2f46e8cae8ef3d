"""Shares, bytes and seconds as text."""


def percent(share: float) -> str:
    """Return a share as per cent without superfluous zeros: 0.875 is `87.5`."""
    return f"{round(100 * share, 6):g}"


def byte_text(count: float) -> str:
    """Return bytes with a decimal unit (1 kB = 1,000 bytes) and three digits: `1.23 GB`."""
    size, unit = byte_unit(count)
    count /= size
    return f"{count:,.0f} {unit}" if size == 1 or count >= 99.95 else f"{count:.3g} {unit}"


def byte_unit(count: float) -> tuple[int, str]:
    """Return the decimal unit that suits a number of bytes: its size in bytes and its name.

    Args:
        count: Number of bytes.

    Returns:
        The size of the unit, a power of 1000, and its name, from `B` to `PB`.
    """
    for power, unit in enumerate(("B", "kB", "MB", "GB", "TB")):
        if count < 999.5 * 1000**power:
            return 1000**power, unit
    return 1000**5, "PB"


def time_text(seconds: float) -> str:
    """Return seconds as text: `0.42 s`, `38 s`, `4 min 05 s`, `2 h 07 min`, `4 days`."""
    if seconds < 59.5:
        return f"{seconds:.2g} s" if seconds < 9.5 else f"{seconds:.0f} s"
    minutes, remainder = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {remainder:02d} s"
    return (
        f"{minutes // 60} h {minutes % 60:02d} min"
        if minutes <= 3 * 1440
        else f"{minutes / 1440:,.0f} days"
    )
