"""Entry point of the `dtrain` command: ready for Ctrl-C and for a closed terminal before anything large is imported."""

from __future__ import annotations

from .terminal.signals import heed, rest


def main() -> None:
    """One line for a person's mistake, an exit code for every end."""
    heed()
    from .terminal.names import take_any_name
    from .terminal.outlet import told

    take_any_name()
    try:
        with told():
            from .commands import app

            app()
    finally:
        rest()
