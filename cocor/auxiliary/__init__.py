"""Register the auxiliary objectives: a file and a line of :data:`AUXILIARIES` each.

The class (a :class:`cocor.auxiliary.base.Auxiliary`) owns its defaults, options and checks. To add one from a script:
``AUXILIARIES["mine"] = Mine``, as with :data:`cocor.methods.METHODS`.
"""

from typing import Any

# The choices of --auxiliary: a class, or where to find it.
AUXILIARIES: dict[str, Any] = {
    "none": "cocor.auxiliary.base:Auxiliary",
    "multiview": "cocor.auxiliary.multiview:MultiView",
    "clsa": "cocor.auxiliary.clsa:CLSA",
    "renyicl": "cocor.auxiliary.renyicl:RenyiCL",
    "augself": "cocor.auxiliary.augself:AugSelf",
    "equimod": "cocor.auxiliary.equimod:EquiMod",
    "stl": "cocor.auxiliary.stl:STL",
    "looc": "cocor.auxiliary.looc:LooC",
    "hierarchical": "cocor.auxiliary.hierarchical:Hierarchical",
    "strongview": "cocor.auxiliary.strongview:StrongView",
}
