"""The table of graphics cards: peak rate, memory, bandwidth, power.

In:  the name that a device gives itself, or what a person calls it.
Out: the row of the table. Here because `device` is about the machine at hand, and this about cards that may be elsewhere.
"""

from __future__ import annotations

import dataclasses
import re

USABLE = 0.98  # of a card's memory: the rest is the driver's
CORRECTED = 15 / 16  # of memory as sold, where error correction that is on as delivered takes its bits from it


@dataclasses.dataclass(frozen=True)
class Card:
    """A GPU: dense bf16/fp16 peak with float32 sums in TFLOP/s, memory in GiB as sold, GB/s of memory, watts."""

    tflops: float
    memory: float
    bandwidth: float
    watts: float
    corrected: bool = False  # GDDR with error correction switched on; HBM has bits of its own for it

    @property
    def usable(self) -> float:
        """GiB that a program can have: 22 of an L4's 24, 23.5 of an RTX 4090's."""
        return self.memory * USABLE * (CORRECTED if self.corrected else 1)


# NVIDIA's data sheets (B200 to T4, RTX PRO 6000, 6000 Ada, A6000, A5000), the GeForce architecture white papers and
# product pages (Turing, Ampere GA102, Ada, Blackwell), AMD's data sheets (MI). The rate is the one without sparsity and,
# on GeForce, with float32 sums: half of what is often quoted. V100, T4 and RTX 20 have float16 alone.
CARDS = {
    "B200": Card(2250.0, 180, 8000, 1000),
    "H200": Card(989.4, 141, 4800, 700),
    "GH200": Card(989.4, 96, 4000, 900),
    "H100": Card(989.4, 80, 3350, 700),
    "H100 PCIe": Card(756.0, 80, 2000, 350),
    "H100 NVL": Card(835.0, 94, 3900, 400),
    "A100": Card(312.0, 40, 1555, 400),
    "A100 80GB": Card(312.0, 80, 2039, 400),
    "A40": Card(149.7, 48, 696, 300, True),
    "A30": Card(165.0, 24, 933, 165),
    "A10": Card(125.0, 24, 600, 150, True),
    "L40S": Card(362.0, 48, 864, 350, True),
    "L40": Card(181.0, 48, 864, 300, True),
    "L4": Card(121.0, 24, 300, 72, True),
    "V100": Card(125.0, 16, 900, 300),
    "V100 32GB": Card(125.0, 32, 900, 300),
    "T4": Card(65.0, 16, 320, 70, True),
    "MI300X": Card(1307.4, 192, 5300, 750),
    "MI325X": Card(1307.4, 256, 6000, 1000),
    "RTX PRO 6000": Card(503.8, 96, 1792, 600),
    "RTX 6000 Ada": Card(364.2, 48, 960, 300),
    "RTX A6000": Card(154.8, 48, 768, 300),
    "RTX A5000": Card(111.1, 24, 768, 230),
    "RTX 5090": Card(209.5, 32, 1792, 575),
    "RTX 5080": Card(112.6, 16, 960, 360),
    "RTX 5070 Ti": Card(87.9, 16, 896, 300),
    "RTX 5070": Card(61.7, 12, 672, 250),
    "RTX 4090": Card(165.2, 24, 1008, 450),
    "RTX 4080 SUPER": Card(104.4, 16, 736, 320),
    "RTX 4080": Card(97.5, 16, 717, 320),
    "RTX 4070 Ti SUPER": Card(88.2, 16, 672, 285),
    "RTX 4070 Ti": Card(80.2, 12, 504, 285),
    "RTX 4070 SUPER": Card(71.0, 12, 504, 220),
    "RTX 4070": Card(58.3, 12, 504, 200),
    "RTX 4060 Ti": Card(44.1, 8, 288, 160),
    "RTX 4060": Card(30.2, 8, 272, 115),
    "RTX 3090 Ti": Card(80.0, 24, 1008, 450),
    "RTX 3090": Card(71.0, 24, 936, 350),
    "RTX 3080 Ti": Card(68.2, 12, 912, 350),
    "RTX 3080": Card(59.5, 10, 760, 320),
    "RTX 3070": Card(40.6, 8, 448, 220),
    "RTX 3060": Card(25.6, 12, 360, 170),
    "RTX 2080 Ti": Card(53.8, 11, 616, 250),
}


def card_of_device(name: str) -> str | None:
    """The card in the table that a device's own name means, such as `NVIDIA A100-SXM4-80GB`; the longest fit wins, and
    no other model of a family stands in for one that is not there (`A40` for an A4000, an RTX 3070 for its Ti).
    """
    fits = [card for card in CARDS if all(re.search(rf"\b{word}\b", name) for word in card.split())]
    best = max(fits, key=len, default="")
    variants = {word for word in ("Ti", "SUPER", "Laptop", "Max-Q", "D") if re.search(rf"\b{word}\b", name)}
    return best if best and variants <= set(best.split()) else None


def card_of_person(name: str) -> str | None:
    """The card that a person means, as in `4090`, `rtx4070ti`, `a100-80gb`; None where none or several fit as well."""

    def parts(text: str) -> set[str]:
        ignored = {"nvidia", "geforce", "tesla", "amd", "instinct", "blackwell"}
        return set(re.findall(r"[a-z]+|\d+", re.sub(r"sxm\d?", " ", text.lower()))) - ignored

    words, fits = parts(name), {}
    for card, row in CARDS.items():
        own = parts(card)
        if words & own and words <= own | {f"{row.memory:.0f}", "gb"}:  # its memory may be said as well
            fits[card] = len(own)
    best = [card for card, size in fits.items() if size == min(fits.values())]
    return best[0] if len(best) == 1 else card_of_device(name) if not fits else None
