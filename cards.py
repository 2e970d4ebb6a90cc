"""The table of graphics cards: peak rate, memory, bandwidth, power.

In:  the name that a device gives itself, or what a person calls it.
Out: the row of the table. Here because `device` is about the machine at hand, and this about cards that may be elsewhere.
"""

from __future__ import annotations

import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class Card:
    """A GPU: dense bf16/fp16 peak with float32 sums in TFLOP/s, memory in GiB as sold, GB/s of memory, watts."""

    tflops: float
    memory: float
    bandwidth: float
    watts: float


# NVIDIA's data sheets (B200 to T4, RTX 6000 Ada, A6000, A5000), the GeForce architecture white papers and product pages
# (Turing, Ampere GA102, Ada, Blackwell), AMD's data sheets (MI). The rate is the one without sparsity and, on GeForce,
# with float32 sums: half of what is often quoted.
CARDS = {
    "B200": Card(2250.0, 180, 8000, 1000),
    "H200": Card(989.4, 141, 4800, 700),
    "GH200": Card(989.4, 96, 4000, 900),
    "H100": Card(989.4, 80, 3350, 700),
    "H100 PCIe": Card(756.0, 80, 2000, 350),
    "H100 NVL": Card(835.0, 94, 3900, 400),
    "A100": Card(312.0, 40, 1555, 400),
    "A100 80GB": Card(312.0, 80, 2039, 400),
    "A40": Card(149.7, 48, 696, 300),
    "A30": Card(165.0, 24, 933, 165),
    "A10": Card(125.0, 24, 600, 150),
    "L40S": Card(362.0, 48, 864, 350),
    "L40": Card(181.0, 48, 864, 300),
    "L4": Card(121.0, 24, 300, 72),
    "V100": Card(125.0, 16, 900, 300),
    "V100 32GB": Card(125.0, 32, 900, 300),
    "T4": Card(65.0, 16, 320, 70),
    "MI300X": Card(1307.4, 192, 5300, 750),
    "MI325X": Card(1307.4, 256, 6000, 1000),
    "RTX 6000 Ada": Card(364.2, 48, 960, 300),
    "RTX A6000": Card(154.8, 48, 768, 300),
    "RTX A5000": Card(111.1, 24, 768, 230),
    "RTX 5090": Card(209.5, 32, 1792, 575),
    "RTX 5080": Card(112.6, 16, 960, 360),
    "RTX 5070 Ti": Card(87.9, 16, 896, 300),
    "RTX 5070": Card(61.7, 12, 672, 250),
    "RTX 4090": Card(165.2, 24, 1008, 450),
    "RTX 4080": Card(97.5, 16, 717, 320),
    "RTX 4070 Ti": Card(80.2, 12, 504, 285),
    "RTX 4070": Card(58.3, 12, 504, 200),
    "RTX 4060 Ti": Card(44.1, 8, 288, 160),
    "RTX 4060": Card(30.2, 8, 272, 115),
    "RTX 3090": Card(71.0, 24, 936, 350),
    "RTX 3080": Card(59.5, 10, 760, 320),
    "RTX 3070": Card(40.6, 8, 448, 220),
    "RTX 3060": Card(25.6, 12, 360, 170),
    "RTX 2080 Ti": Card(53.8, 11, 616, 250),
}


def card_of_device(name: str) -> str | None:
    """The card in the table that a device's own name means, such as `NVIDIA A100-SXM4-80GB`; the longest fit wins."""
    fits = [
        card for card in CARDS if all(re.search(rf"\b{word}\b", name) for word in card.split())
    ]  # no A40 in an A4000
    return max(fits, key=len) if fits and "Laptop" not in name else None


def card_of_person(name: str) -> str | None:
    """The card that a person means, as in `4090`, `rtx4070ti`, `a100-80gb`."""

    def parts(text: str) -> set[str]:
        return set(re.findall(r"[a-z]+|\d+", text.lower())) - {"nvidia", "geforce", "tesla", "amd", "instinct"}

    fits = [card for card in CARDS if parts(name) and parts(name) <= parts(card)]
    return min(fits, key=len) if fits else card_of_device(name)
