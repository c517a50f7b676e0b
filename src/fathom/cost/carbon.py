"""An estimate of the energy and CO2 of a training from accelerator-hours, with its assumptions."""

from __future__ import annotations

from dataclasses import dataclass

from fathom.models.method import check_number

WORLD = 0.475  # kg of CO2 equivalent a kWh: the world's mean that GeoGalactica's report takes (arXiv 2401.00434)


@dataclass(frozen=True)
class Carbon:
    """kwh: energy.   kg: CO2 equivalent.   assumptions: sentences that say what both are based on."""

    kwh: float
    kg: float
    assumptions: tuple[str, ...]

    def __str__(self) -> str:
        said = f"{_number(self.kwh)} kWh, {_number(self.kg)} kg CO2e. Assumed:"
        return "\n".join([said, *(f"- {line}" for line in self.assumptions)])


def estimate_carbon(hours: float, tdp_w: float, kg_per_kwh: float = WORLD, pue: float = 1.0) -> Carbon:
    """kwh = hours · tdp_w / 1000 · pue;   kg = kwh · kg_per_kwh.

    Args:
        hours: of one accelerator, or summed over all that ran.
        tdp_w: watts that one draws.
        kg_per_kwh: CO2 equivalent of the electricity.
        pue: power usage effectiveness: energy of the whole site / energy of the accelerators, at least 1.

    Raises ValueError for a number that is negative or not finite.
    """
    for name, value, low in (("hours", hours, 0), ("tdp_w", tdp_w, 0), ("kg_per_kwh", kg_per_kwh, 0), ("pue", pue, 1)):
        check_number("estimate_carbon", name, value, low)
    kwh = hours * tdp_w / 1000 * pue
    return Carbon(
        kwh,
        kwh * kg_per_kwh,
        (
            f"{_number(hours)} accelerator-hours, each at {tdp_w:g} W throughout: an upper bound if that is the TDP.",
            f"{kg_per_kwh:g} kg CO2e per kWh" + (", a mean of the world." if kg_per_kwh == WORLD else "."),
            f"The rest of the site {'draws nothing' if pue == 1 else f'adds {pue - 1:.0%}'} (PUE {pue:g}).",
            "What making the hardware emitted, and runs that failed or were tried before, are not counted.",
        ),
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
